"""Models that nobody here wrote, tiny and with random weights: one of each kind that transformers has, and forms of our own."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEQ, WIDTH, VOCABULARY = 6, 16, 37


class Family(NamedTuple):
    """A model: its use, and how it's made and called.

    make: the model, before it's cast to float64. batch: its arguments, from PyTorch's generator
    layer: the class of its layers. part: one that can be frozen, compiled, or get an infinite gradient
    gap: how far a parameter may be from one process's. Where the model itself computes in float32, a sum that changes in
    its sixteenth digit may change a number in its eighth
    """

    what: str
    make: Callable[[], nn.Module]
    batch: Callable[[], dict]
    layer: str
    part: str
    gap: float = 1e-12


def made(name: str) -> nn.Module:
    """The family's model in float64, the same in every process. Vectors, which begin at 0 or 1, are random."""
    torch.manual_seed(0)
    model = FAMILIES[name].make().double().train()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def loss_of(output) -> Tensor:
    return output.square().mean() if isinstance(output, Tensor) else output.loss


def hugging_face(name: str, head: str, **config) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, name.removesuffix("Text") + head)(getattr(transformers, f"{name}Config")(**config))

    return make


def tokens() -> dict:
    ids_BT = torch.randint(1, VOCABULARY, (2, SEQ))
    return {"input_ids": ids_BT, "labels": ids_BT}


def translated() -> dict:
    return tokens() | {"labels": tokens()["labels"]}


def picture() -> dict:
    return {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64), "labels": torch.randint(3, (2,))}


def described() -> dict:
    ids_BT = tokens()["input_ids"]
    ids_BT[:, -1] = VOCABULARY - 1  # a text ends there
    return {"pixel_values": picture()["pixel_values"], "input_ids": ids_BT, "return_loss": True}


def rows() -> dict:
    return {"x": torch.randn(2, SEQ, WIDTH, dtype=torch.float64)}


# Forms that transformers has not.


class Outside(nn.Module):
    """Parameters past their modules: the model's own, in a list, one of one element that others read, a weight in F.linear."""

    def __init__(self):
        super().__init__()
        self.start, self.shifts = nn.Parameter(torch.randn(WIDTH)), nn.ParameterList(torch.randn(WIDTH) for _ in range(2))
        self.layers, self.temperature = nn.ModuleList(Squared() for _ in range(2)), Temperature()

    def forward(self, x):
        x = x + self.start
        for layer, shift in zip(self.layers, self.shifts, strict=True):
            x = layer(x) + shift
        return F.linear(x, self.layers[0].up.weight) / self.temperature.log.exp()


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.tensor([0.5]))


class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        return x + F.linear(torch.relu(self.up(x)).square(), self.down.weight, self.down.bias)


class Unused(nn.Module):
    """Parameters that nobody uses: beside used ones, a layer, and a head."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Extra() for _ in range(3)), nn.Linear(WIDTH, 3)

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        return x


class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.extra = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return torch.tanh(self.used(x))


class Parts(nn.Module):
    """PyTorch's own parts: a recurrent one, attention that reads its inner layer's weight, and statistics of a rank's rows."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.norm = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.BatchNorm1d(SEQ)
        self.layers = nn.ModuleList(Attentive() for _ in range(2))

    def forward(self, x):
        x = self.norm(self.recurrent(x)[0])
        for layer in self.layers:
            x = layer(x)
        return x


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


FEW = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "use_cache": False}
UNMARKED = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = FEW | TEXT | UNMARKED | {"num_key_value_heads": 2, "head_dim": 4}
SPARSE = LLAMA | {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "experts_implementation": "eager"}
DEEPSEEK = SPARSE | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
DEEPSEEK |= {"n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4}
DEEPSEEK |= {"qk_nope_head_dim": 4, "v_head_dim": 8}
GPT2 = TEXT | UNMARKED | {"n_layer": 2, "n_embd": WIDTH, "n_head": 4, "n_positions": 16, "loss_type": "ForCausalLM"}
GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
OPT = FEW | TEXT | {"ffn_dim": 24, "word_embed_proj_dim": WIDTH, "dropout": 0.0}
MAMBA = TEXT | UNMARKED | {"hidden_size": WIDTH, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2}
T5 = TEXT | {"d_model": WIDTH, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0}
SIDES = {"layers": 2, "attention_heads": 4, "ffn_dim": 24}
BART = TEXT | {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in SIDES.items()}
BART |= {"d_model": WIDTH, "dropout": 0.0}
IMAGE = {"image_size": 8, "num_labels": 3, "hidden_dropout_prob": 0.0}
SWIN = {"patch_size": 1, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0}
CLIP = {"text_config": FEW | TEXT | {"eos_token_id": VOCABULARY - 1, "bos_token_id": 0, "pad_token_id": 0}}
CLIP |= {"vision_config": FEW | {"image_size": 8, "patch_size": 4}, "projection_dim": 8}
LM, FIRST, CLOSE = "ForCausalLM", "model.layers.0", 1e-7

FAMILIES = {
    "Llama": Family("decoder", hugging_face("Llama", LM, **LLAMA), tokens, "LlamaDecoderLayer", FIRST, CLOSE),
    "Gemma 3": Family(
        "decoder with windows, tied",
        hugging_face("Gemma3Text", LM, **LLAMA | {"sliding_window": 4, "pad_token_id": 0}),
        tokens,
        "Gemma3DecoderLayer",
        FIRST,
        CLOSE,
    ),
    "GPT-2": Family("decoder, tied", hugging_face("GPT2", "LMHeadModel", **GPT2), tokens, "GPT2Block", "transformer.h.0"),
    "OPT": Family(
        "decoder called past its parent", hugging_face("OPT", LM, **OPT), tokens, "OPTDecoderLayer", "model.decoder.layers.0"
    ),
    "Mixtral": Family(
        "experts",
        hugging_face("Mixtral", LM, **SPARSE, num_local_experts=4),
        tokens,
        "MixtralDecoderLayer",
        FIRST,
        CLOSE,
    ),
    "DeepSeek-V3": Family(
        "experts, one of them shared",
        hugging_face("DeepseekV3", LM, **DEEPSEEK),
        tokens,
        "DeepseekV3DecoderLayer",
        FIRST,
        CLOSE,
    ),
    "Mamba": Family("state space", hugging_face("Mamba", LM, **MAMBA), tokens, "MambaBlock", "backbone.layers.0", CLOSE),
    "T5": Family(
        "encoder and decoder, tied",
        hugging_face("T5", "ForConditionalGeneration", **T5),
        translated,
        "T5Block",
        "encoder.block.0",
        CLOSE,
    ),
    "BART": Family(
        "encoder and decoder",
        hugging_face("Bart", "ForConditionalGeneration", **BART),
        translated,
        "BartDecoderLayer",
        "model.encoder.layers.0",
    ),
    "BERT": Family(
        "encoder", hugging_face("Bert", "ForMaskedLM", **FEW, **TEXT, **QUIET), tokens, "BertLayer", "bert.encoder.layer.0"
    ),
    "ViT": Family(
        "vision",
        hugging_face("ViT", "ForImageClassification", **FEW, **QUIET | IMAGE, patch_size=4),
        picture,
        "ViTLayer",
        "vit.layers.0",
    ),
    "Swin 2": Family(
        "vision with windows",
        hugging_face("Swinv2", "ForImageClassification", **SWIN | IMAGE),
        picture,
        "Swinv2Layer",
        "swinv2.encoder.layers.0",
    ),
    "CLIP": Family(
        "text and vision", hugging_face("CLIP", "Model", **CLIP), described, "CLIPEncoderLayer", "vision_model.encoder.layers.0"
    ),
    "torch.nn": Family("LSTM, attention and batch norm", Parts, rows, "Attentive", "layers.0"),
    "outside": Family("parameters read past their modules", Outside, rows, "Squared", "layers.0"),
    "unused": Family("parameters that nobody uses", Unused, rows, "Extra", "layers.0"),
}
