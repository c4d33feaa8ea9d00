"""Which engines share, in one table: what differs between two, and the case that proves it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

#: `wrong_names`, `default_mode`, `parallel`: on real engines. `scheduler`: real schedulers and a
#: real pool. The others: the name that an engine shares under.
PAIRS = """
share | compiled, and eager                     | default_mode: eager
share | the model's directory                   | default_mode: elsewhere, in two files
share | `eos_token_id` in config.json           | default_mode: elsewhere, in two files
share | `use_cache` in config.json              | default_mode: elsewhere, in two files
share | the same tensors in one file and in two | default_mode: elsewhere, in two files
share | adapters allowed, for base requests     | default_mode: with adapters allowed
share | an adapter's name and path              | scheduler: an adapter elsewhere
share | an adapter's path                       | wrong_names: test_of_two_adapters_one_was_replaced
share | sizes of batches, compiler's cache      | default_mode: for other sizes
share | weights updated in place, and loaded    | names: test_files_count_where_memory_hides_weights
share | tensor parallel size, in head parts     | parallel: test_what_one_size_of_tensor_parallelism
apart | rope theta                              | wrong_names: rope theta
apart | rope scaling                            | wrong_names: yarn
apart | the longest context, if it scales rope  | wrong_names: longrope
apart | experts per token                       | wrong_names: experts per token
apart | a part of the weights                   | wrong_names: embeddings
apart | an adapter's tensors, under one path    | wrong_names: test_of_two_adapters_one_was_replaced
apart | adapters                                | scheduler: adapters
apart | an adapter, and none                    | scheduler: adapted and not
apart | salts                                   | scheduler: salts
apart | pictures                                | scheduler: pictures
apart | pipeline stages                         | parallel: test_pipeline_stages_share_with_equals
apart | type of the weights                     | shape: model_config.dtype
apart | quantization                            | shape: model_config.quantization
apart | sliding window                          | shape: model_config.hf_config.sliding_window
apart | epsilon of norms                        | shape: model_config.hf_config.rms_norm_eps
apart | implementation of the model             | shape: model_config.model_impl
apart | layers whose KV has another type        | shape: cache_config.kv_cache_dtype_skip_layers
apart | vLLM's version                          | shape: test_releases_and_builds_share
apart | its plug-ins                            | environment: test_plugins_count
apart | variables that may change numbers       | environment: test_what_may_change_numbers
"""


@pytest.mark.parametrize("row", PAIRS.strip().splitlines())
def test_the_case_that_proves_a_pair_is_there(row: str) -> None:
    file, case = row.split("| ")[-1].split(": ")
    [path] = Path(__file__).parent.rglob(f"test_{file}.py")
    assert re.search(rf'"{re.escape(case)}"|def {re.escape(case)}', path.read_text())
