"""Coverage-guided fuzzing with atheris: `make fuzz`, or `make fuzz SECONDS=600`.

Each module is one target and states one property; `driver` runs it. What a run has learned stays
in `corpus/`, which is not kept in the repository; the seeds come from `tests/wire/samples.py`. An
input that breaks the property lies in `corpus/` afterwards, and `python -m tests.fuzz.wire FILE`
plays it again. pytest collects nothing here: the tests do not need atheris.
"""
