"""Small models of many kinds, from configurations of ``transformers`` and ``timm``: no weights.

timm imports torchvision, of which there is no build for every torch: where it is missing, a module
of that name stands in for it. The models used here call nothing of it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from specimens import Specimen

VOCABULARY: Final = 96
LENGTH: Final = 12

# Sizes under the names that configurations have for them; each takes those that it knows.
SIZES: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DROPOUTS: Final = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"),
    *("activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"),
    *("hidden_dropout", "drop_path_rate"),
)
ENCODER_DECODER: Final = {
    "d_model": 64,
    "decoder_start_token_id": 0,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
T5: Final = {
    "decoder_start_token_id": 0,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
}
EXPERTS: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
IMAGES: Final = {"image_size": 32, "patch_size": 8, "num_channels": 3, "num_labels": 4}

# (model, configuration, what it needs besides the sizes above, what it is fed, which kind it is)
TEXT: Final[tuple[tuple[str, str, dict[str, Any], str], ...]] = (
    ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4}, "tied weights"),
    ("LlamaForCausalLM", "LlamaConfig", {}, "decoder, rotary buffers"),
    ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 128, "word_embed_proj_dim": 64}, "tied weights"),
    ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}, "decoder, parallel residuals"),
    ("BloomForCausalLM", "BloomConfig", {"n_layer": 2, "n_head": 4}, "decoder, alibi"),
    ("GemmaForCausalLM", "GemmaConfig", {"head_dim": 16}, "tied weights, scaled embeddings"),
    ("MixtralForCausalLM", "MixtralConfig", EXPERTS, "mixture of experts"),
    (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "decoder_sparse_step": 1,
        },
        "mixture of experts, a shared one",
    ),
    ("MambaForCausalLM", "MambaConfig", {"state_size": 8}, "state-space"),
    (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 4},
        "state-space",
    ),
    (
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {"lru_width": 64, "block_types": ["recurrent", "attention"], "attention_window_size": 8},
        "recurrent",
    ),
    ("BertForMaskedLM", "BertConfig", {}, "encoder, tied weights, buffers"),
    ("RobertaForMaskedLM", "RobertaConfig", {}, "encoder, tied weights"),
    ("AlbertForMaskedLM", "AlbertConfig", {"embedding_size": 32}, "one layer used twice"),
    (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
        "encoder",
    ),
    ("T5ForConditionalGeneration", "T5Config", T5, "encoder–decoder, tied weights"),
    ("BartForConditionalGeneration", "BartConfig", ENCODER_DECODER, "encoder–decoder, buffers"),
    (
        "MarianMTModel",
        "MarianConfig",
        {**ENCODER_DECODER, "decoder_vocab_size": VOCABULARY},
        "encoder–decoder, fixed positions",
    ),
)
VISION: Final[tuple[tuple[str, str, dict[str, Any], str], ...]] = (
    ("ViTForImageClassification", "ViTConfig", IMAGES, "vision transformer"),
    (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 4},
        "convolutions, batch norm",
    ),
    (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "num_labels": 4},
        "convolutions, random depth",
    ),
)
TIMM: Final = (
    ("resnet18", "convolutions, batch norm"),
    ("mobilenetv3_small_050", "depthwise convolutions, batch norm"),
    ("efficientnet_lite0", "convolutions, random depth"),
    ("regnetx_002", "grouped convolutions"),
    ("densenet121", "convolutions, concatenated"),
    ("vit_tiny_patch16_224", "vision transformer"),
    ("deit_tiny_distilled_patch16_224", "vision transformer, two heads"),
    ("mixer_s32_224", "perceptrons"),
    ("convnext_atto", "convolutions, layer norm"),
)


def of_transformers() -> Iterator[Specimen]:
    """Models of ``transformers``, and two recurrent ones of torch itself."""
    yield Specimen("torch.nn.LSTM (recurrent)", lambda: _optimized(Recurrent(torch.nn.LSTM)), _text)
    yield Specimen("torch.nn.GRU (recurrent)", lambda: _optimized(Recurrent(torch.nn.GRU)), _text)
    if importlib.util.find_spec("transformers") is None:
        return
    for rows, step in ((TEXT, _text), (VISION, _images)):
        for model, config, given, kind in rows:
            yield Specimen(f"{model} ({kind})", _maker(model, config, given), step)


def of_timm() -> Iterator[Specimen]:
    """Models of ``timm``."""
    if importlib.util.find_spec("timm") is None:
        return
    for name, kind in TIMM:
        yield Specimen(f"timm.{name} ({kind})", lambda name=name: _from_timm(name), _images)  # type: ignore[misc]


def warm() -> None:
    """Import what the models are made of, once for all that are forked."""
    if importlib.util.find_spec("transformers") is not None:
        import transformers

        for model, config, *_ in (*TEXT, *VISION):
            getattr(transformers, model), getattr(transformers, config)
    if importlib.util.find_spec("timm") is not None:
        _stand_in_for_torchvision()
        import timm  # noqa: F401


class Recurrent(torch.nn.Module):  # type: ignore[misc]
    """An embedding, a recurrent layer that keeps its last state in a buffer, tied weights."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 64)
        self.layer = kind(64, 64, num_layers=2, dropout=0.1, batch_first=True)
        self.head = torch.nn.Linear(64, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.last: torch.Tensor
        self.register_buffer("last", torch.zeros(64))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """The loss, as transformers give it."""
        found, _ = self.layer(self.embedding(input_ids) + self.last)
        self.last = found.detach().mean((0, 1))
        scores = self.head(found).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, labels.flatten())
        return types.SimpleNamespace(loss=loss)


def _maker(model: str, config: str, given: dict[str, Any]) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        import transformers

        transformers.logging.set_verbosity_error()
        kind: Any = getattr(transformers, config)
        plain = kind()
        sizes = {name: value for name, value in SIZES.items() if hasattr(plain, name)}
        drops = {name: 0.1 for name in DROPOUTS if isinstance(getattr(plain, name, None), float)}
        return _optimized(getattr(transformers, model)(kind(**{**sizes, **drops, **given})))

    return make


def _from_timm(name: str) -> tuple[Any, Any]:
    import timm

    shape = {"img_size": 64} if any(word in name for word in ("vit_", "deit", "mixer")) else {}
    return _optimized(timm.create_model(name, num_classes=4, drop_rate=0.1, **shape))


def _optimized(model: torch.nn.Module) -> tuple[Any, Any]:
    model.train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _text(model: torch.nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + number)
    words = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    optimizer.zero_grad()
    loss: torch.Tensor = model(input_ids=words, labels=words).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def _images(model: torch.nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + number)
    size = 64 if type(model).__module__.startswith("timm") else 32
    given = torch.randn(2, 3, size, size, generator=generator)
    wanted = torch.randint(0, 4, (2,), generator=generator)
    optimizer.zero_grad()
    found = model(given)
    found = getattr(found, "logits", found)
    found = sum(found) if isinstance(found, tuple) else found
    loss = torch.nn.functional.cross_entropy(found, wanted)
    loss.backward()
    optimizer.step()
    return loss.detach()


# --- torchvision ----------------------------------------------------------------------------------


class _Named(type):
    """A class that does nothing, in which every name stands for itself."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Anything(types.ModuleType):
    """A module in which every name is there, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Finder:
    """Finds torchvision and all that is in it, where nobody else does."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def _stand_in_for_torchvision() -> None:
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Finder())
