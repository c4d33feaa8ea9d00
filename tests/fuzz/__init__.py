"""Coverage-guided fuzzing with atheris: `make fuzz`, or `make fuzz SECONDS=600`.

Each module is one target and states one property; `driver` runs it. A run keeps its inputs in
`corpus/`, which is not part of the repository; the seeds come from `tests/wire/samples.py`. An
input that breaks the property is written to `corpus/`, and `python -m tests.fuzz.wire FILE` runs it
again. pytest collects nothing here, because the tests do not need atheris.
"""
