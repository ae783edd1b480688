"""theory.models: the named shapes against the counts of their papers and of their released checkpoints."""

import copy
import pickle
from dataclasses import replace
from fractions import Fraction

import pytest

from manyranks import theory
from manyranks.theory import published
from manyranks.theory.architecture import parameters_of
from manyranks.theory.shapes import hybrids, models

# Weights in the released checkpoints (safetensors headers), without buffers. Of others, test_hf_config has them.
RELEASED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-3b": 3_212_749_824,
    "llama-65b": 65_285_660_672,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "yi-34b": 34_388_917_248,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2": 235_741_434_880,
    "qwen2-72b": 72_706_203_648,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bloom-176b": 176_247_271_424,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-12b": 11_846_072_320,
}
# Billions, as the papers print them.
TOTAL_AND_ACTIVE = {
    "mixtral-8x7b": (46.7, 12.9),  # mistral.ai/news/mixtral-of-experts
    "mixtral-8x22b": (141, 39),  # mistral.ai/news/mixtral-8x22b
    "deepseek-v2": (236, 21),  # arXiv 2405.04434, abstract
    "deepseek-v2-lite": (15.7, 2.4),  # the same, appendix B; its active count leaves one embedding out
    "deepseek-v3": (671, 37),  # arXiv 2412.19437, abstract
    "qwen3-30b-a3b": (30.5, 3.3),  # arXiv 2505.09388
    "qwen3-235b-a22b": (235, 22),
    "kimi-k2": (1040, 32.6),  # arXiv 2507.20534, abstract and Table 2
    "glm-4.5": (355, 32),  # arXiv 2508.06471, Table 1: with the prediction module, without embedding and head
    "glm-4.5-air": (106, 12),
    "gpt-oss-20b": (20.91, 3.61),  # arXiv 2508.10925, Table 1; the input embedding isn't active
    "gpt-oss-120b": (116.83, 5.13),
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_named_model_has_the_weights_of_its_released_checkpoint(name):
    assert models[name].parameters == RELEASED[name]


@pytest.mark.parametrize("name", TOTAL_AND_ACTIVE)
def test_models_with_experts_have_the_published_total_and_active_counts(name):
    shape, (total, active) = models[name], TOTAL_AND_ACTIVE[name]
    ends = 2 * shape.embedding_parameters if name.startswith("glm") else 0
    counted = shape.parameters + (shape.mtp_parameters - ends if ends else 0)
    assert counted / 1e9 == pytest.approx(total, rel=2e-2 if name in ("kimi-k2", "glm-4.5-air") else 5e-3)
    without = ends or (shape.embedding_parameters if name == "deepseek-v2-lite" or name.startswith("gpt-oss") else 0)
    assert (shape.active_parameters - without) / 1e9 == pytest.approx(active, rel=0.025)


@pytest.mark.parametrize(
    ("name", "released"), [("glm-4.5", 358_337_791_296), ("glm-4.5-air", 110_468_824_832), ("deepseek-v3", 685e9)]
)
def test_models_with_their_prediction_modules_are_the_released_checkpoints(name, released):
    shape = models[name]
    copies = parameters_of(shape.embedding + shape.head)  # the checkpoints store both again
    assert shape.parameters + shape.mtp_parameters + copies == pytest.approx(released, abs=0.6e9 if released == 685e9 else 0)


def test_every_other_layer_of_gpt_oss_looks_back_128_tokens():
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        shape = models[name]
        assert (shape.window, 2 * shape.window_layers) == (128, shape.layers)


@pytest.mark.parametrize("row", published.rows("megatron_sc21_table1"), ids=lambda row: row["params_B"])
def test_megatron_s_models_have_the_paper_s_count_and_a_final_norm(row):
    shape = models[f"megatron-{float(row['params_B']):g}b"]
    layers, h, vocab, seq = (int(row[name]) for name in ("layers", "hidden", "vocab", "seq"))
    # Equation 2 of arXiv 2104.04473; it leaves the last LayerNorm out.
    paper = 12 * layers * h**2 * (1 + Fraction(13, 12 * h) + Fraction(vocab + seq, 12 * layers * h))
    assert shape.parameters - paper == 2 * h
    assert shape.parameters / 1e9 == pytest.approx(float(row["params_B"]), abs=0.051)


@pytest.mark.parametrize(
    ("name", "billions", "digits"),
    [
        *(("megatron-22b", 22, 0), ("megatron-175b", 175, 0), ("megatron-530b", 530, 0), ("megatron-1t", 1008, 0)),
        *(("zb-1.5b", 1.5, 1), ("zb-6.2b", 6.2, 1), ("zb-14.6b", 14.6, 1), ("zb-28.3b", 28.3, 1), ("opt-175b", 175, 0)),
        *(("gpt3-175b", 174.6, 1), ("palm-540b", 540.4, 1)),
    ],
)
def test_a_model_is_as_large_as_its_name_or_its_paper_says(name, billions, digits):
    assert round(models[name].parameters / 1e9, digits) == billions


@pytest.mark.parametrize("row", published.rows("gemma2_training"), ids=lambda row: row["model"])
def test_gemma_2_has_the_report_s_counts_with_and_without_embedding(row):
    shape = models[f"gemma2-{row['model'].lower()}"]
    assert shape.embedding_parameters == int(row["embed_params"])
    assert shape.parameters - shape.embedding_parameters == int(row["non_embed_params"])


def test_llama_3_in_the_table_has_the_head_size_that_follows_from_its_heads():
    for row in published.rows("llama3_architecture"):
        assert models[f"llama3-{row['model'].lower()}"].head_size == int(row["head_dim"])


def test_every_named_model_says_where_it_is_from_and_survives_copying():
    assert all(name == shape.name and shape.source for name, shape in models.items())
    assert pickle.loads(pickle.dumps(dict(models))) == copy.deepcopy(dict(models)) == models


def test_hybrids_have_the_weights_of_their_released_checkpoints_and_the_printed_active_ones():
    qwen, nemotron = hybrids["qwen3-next-80b-a3b"], hybrids["nemotron-3-nano-30b-a3b"]
    assert qwen.parameters + qwen.mtp_parameters == 81_324_862_720
    assert nemotron.parameters - 23 * 128 == 31_577_937_344  # the checkpoint counts the routers' biases among its buffers
    assert (qwen.parameters / 1e9, nemotron.parameters / 1e9) == pytest.approx((80, 31.6), rel=5e-3)
    lookup = {shape.name: shape.shape.embedding_parameters for shape in (qwen, nemotron)}
    assert nemotron.active_parameters / 1e9 == pytest.approx(3.6, abs=0.05)  # arXiv 2512.20848, with embeddings and without
    assert (nemotron.active_parameters - lookup[nemotron.name]) / 1e9 == pytest.approx(3.2, abs=0.05)
    for name, total, active in (("flash", 284, 13), ("pro", 1600, 49)):  # arXiv 2606.19348, abstract
        shape = hybrids[f"deepseek-v4-{name}"]
        assert shape.parameters / 1e9 == pytest.approx(total, rel=0.02)
        assert round((shape.active_parameters - shape.shape.embedding_parameters) / 1e9) == active
    assert int((qwen.active_parameters - 2 * lookup[qwen.name]) / 1e9) == 3  # as its name says
    assert all(shape.source and name == shape.name for name, shape in hybrids.items())


def test_no_estimate_takes_a_hybrid():
    with pytest.raises(
        ValueError, match=r"model 'qwen3-next-80b-a3b' is a hybrid: theory.hybrids\['qwen3-next-80b-a3b'\] counts"
    ):
        models["qwen3-next-80b-a3b"]
    with pytest.raises(ValueError, match="shape='nemotron-3-nano-30b-a3b': only a hybrid's parameters are counted"):
        theory.flops.per_token(hybrids["nemotron-3-nano-30b-a3b"], 4096)
    qwen, dense = hybrids["qwen3-next-80b-a3b"], models["llama3-405b"]
    with pytest.raises(ValueError, match="mixers in 72 of 48 layers that mix tokens"):
        replace(qwen, mixers=2 * qwen.mixers)
    with pytest.raises(ValueError, match="its MLPs must have experts"):
        replace(qwen, shape=dense)


def test_an_unknown_model_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"'lama3-8b'.*did you mean 'llama3-8b'"):
        models["lama3-8b"]
    assert "lama3-8b" not in models
    assert models.get("lama3-8b") is None
