"""The world's models, as their own libraries ship them, small enough for two cores.

    MODELS[name].make() -> model, loss_of       loss_of(model) -> scalar, on data made once

Weights are random and sizes fixed; whatever a library does by default (caches, dropout, attention's
kind) stays as it is. QUICK has two of torch's own for a smoke run, and one whose library is not
there.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[nn.Module], Tensor]
Made = tuple[nn.Module, Loss]
_VOCABULARY = 2000


@dataclass(frozen=True)
class Model:
    """One row of the benchmark: how it is made, and the library that it comes from."""

    name: str
    library: str
    transformer: bool
    make: Callable[[], Made]


MODELS: dict[str, Model] = {}
QUICK: dict[str, Model] = {}


def _model(
    library: str, *, transformer: bool = False, into: dict[str, Model] = MODELS
) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def enter(make: Callable[[], Made]) -> Callable[[], Made]:
        name = make.__name__.strip("_")
        into[name] = Model(name, library, transformer, make)
        return make

    return enter


# ------------------------------------------------------------------------------ language models


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, _VOCABULARY, (batch, length))


def _next_token(model: nn.Module, batch: int = 4, length: int = 256) -> Made:
    ids = _ids(batch, length)
    return model, lambda m: m(input_ids=ids, labels=ids).loss


def _causal(kind: str, *, batch: int = 4, length: int = 256, **config: Any) -> Made:
    """A causal language model of transformers, by the name of its classes."""
    library = importlib.import_module("transformers")
    settings = getattr(library, f"{kind}Config")(vocab_size=_VOCABULARY, **config)
    return _next_token(getattr(library, f"{kind}ForCausalLM")(settings), batch, length)


_LLAMA = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}


def _llama(layers: int = 6, **config: Any) -> Made:
    return _causal("Llama", num_hidden_layers=layers, **_LLAMA, **config)


@_model("transformers", transformer=True)
def gpt2() -> Made:
    library = importlib.import_module("transformers")
    config = library.GPT2Config(
        vocab_size=_VOCABULARY, n_positions=256, n_embd=192, n_layer=6, n_head=6
    )
    return _next_token(library.GPT2LMHeadModel(config))


@_model("transformers", transformer=True)
def llama() -> Made:
    return _llama()


@_model("transformers", transformer=True)
def llama_bf16_autocast() -> Made:
    model, loss_of = _llama()

    def cast(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(m)

    return model, cast


@_model("transformers", transformer=True)
def llama_checkpointed() -> Made:
    model, loss_of = _llama()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model, loss_of


@_model("transformers", transformer=True)
def llama_eager_attention() -> Made:
    return _llama(4, attn_implementation="eager")


@_model("peft", transformer=True)
def lora_llama() -> Made:
    peft = importlib.import_module("peft")
    model, loss_of = _llama()
    config = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj", "up_proj"]
    )
    return peft.get_peft_model(model, config), loss_of


@_model("transformers", transformer=True)
def qwen3() -> Made:
    return _causal("Qwen3", num_hidden_layers=4, head_dim=32, **_LLAMA)


@_model("transformers", transformer=True)
def gemma2_eager() -> Made:
    return _causal(
        "Gemma2", num_hidden_layers=4, head_dim=32, attn_implementation="eager", **_LLAMA
    )


@_model("transformers", transformer=True)
def qwen2_moe() -> Made:
    return _causal(
        "Qwen2Moe",
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
    )


@_model("transformers", transformer=True)
def mixtral() -> Made:
    return _causal(
        "Mixtral",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


@_model("transformers")
def mamba() -> Made:
    return _causal("Mamba", batch=2, length=128, hidden_size=128, num_hidden_layers=3)


@_model("transformers", transformer=True)
def t5() -> Made:
    library = importlib.import_module("transformers")
    config = library.T5Config(
        vocab_size=_VOCABULARY,
        d_model=192,
        d_kv=32,
        d_ff=512,
        num_layers=3,
        num_heads=6,
        decoder_start_token_id=0,
    )
    return _next_token(library.T5ForConditionalGeneration(config), 8, 128)


def _bert(layers: int, **config: Any) -> Made:
    library = importlib.import_module("transformers")
    settings = library.BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=192,
        num_hidden_layers=layers,
        num_attention_heads=6,
        intermediate_size=768,
        **config,
    )
    ids, labels = _ids(8, 128), torch.randint(0, 2, (8,))
    model = library.BertForSequenceClassification(settings)
    return (
        model,
        lambda m: m(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss,
    )


@_model("transformers", transformer=True)
def bert_eager() -> Made:
    return _bert(6, attn_implementation="eager")


@_model("transformers", transformer=True)
def bert() -> Made:
    return _bert(4)


# -------------------------------------------------------------------------- sound, images, video


@_model("transformers", transformer=True)
def whisper() -> Made:
    library = importlib.import_module("transformers")
    config = library.WhisperConfig(
        vocab_size=_VOCABULARY,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_source_positions=200,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    sound, labels = torch.randn(4, 80, 400), torch.randint(3, _VOCABULARY, (4, 64))
    model = library.WhisperForConditionalGeneration(config)
    return model, lambda m: m(input_features=sound, labels=labels).loss


@_model("transformers", transformer=True)
def vit() -> Made:
    library = importlib.import_module("transformers")
    config = library.ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=768,
        image_size=96,
        patch_size=8,
        num_labels=10,
    )
    images, labels = torch.randn(8, 3, 96, 96), torch.randint(0, 10, (8,))
    model = library.ViTForImageClassification(config)
    return model, lambda m: m(pixel_values=images, labels=labels).loss


@_model("transformers", transformer=True)
def segformer() -> Made:
    library = importlib.import_module("transformers")
    config = library.SegformerConfig(num_labels=10, depths=[1, 1, 1, 1])
    images, labels = torch.randn(2, 3, 128, 128), torch.randint(0, 10, (2, 128, 128))
    model = library.SegformerForSemanticSegmentation(config)
    return model, lambda m: m(pixel_values=images, labels=labels).loss


def _timm(name: str, batch: int, side: int = 96, **settings: Any) -> Made:
    with _without_torchvision():
        model = importlib.import_module("timm").create_model(name, **settings)
    images, labels = torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))
    return model, lambda m: F.cross_entropy(m(images), labels)


@_model("timm")
def resnet50() -> Made:
    return _timm("resnet50", 8)


@_model("timm")
def convnext() -> Made:
    return _timm("convnext_atto", 8, drop_path_rate=0.1)


@_model("timm")
def efficientnet() -> Made:
    return _timm("efficientnet_b0", 4)


@_model("timm")
def densenet() -> Made:
    return _timm("densenet121", 4)


@_model("timm")
def mobilenet() -> Made:
    return _timm("mobilenetv3_small_100", 8)


@_model("timm", transformer=True)
def swin() -> Made:
    return _timm("swin_tiny_patch4_window7_224", 4, 112, img_size=112, depths=(1, 1, 2, 1))


@_model("diffusers")
def diffusion_unet() -> Made:
    library = importlib.import_module("diffusers")
    model = library.UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(64, 64, 128),
        norm_num_groups=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )
    images, noise = torch.randn(4, 3, 32, 32), torch.randn(4, 3, 32, 32)
    times = torch.randint(0, 1000, (4,))
    return model, lambda m: F.mse_loss(m(images, times).sample, noise)


@_model("diffusers", transformer=True)
def dit() -> Made:
    library = importlib.import_module("diffusers")
    model = library.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        num_layers=4,
        sample_size=32,
        patch_size=2,
    )
    images, times = torch.randn(4, 4, 32, 32), torch.randint(0, 1000, (4,))
    classes = torch.randint(0, 10, (4,))
    return model, lambda m: m(images, timestep=times, class_labels=classes).sample.square().mean()


# ------------------------------------------------------------------- graphs, sequences, clicks


def _graph(kind: str, **settings: Any) -> Made:
    library = importlib.import_module("torch_geometric.nn")
    model = getattr(library, kind)(
        in_channels=64, hidden_channels=128, num_layers=3, out_channels=10, **settings
    )
    nodes, edges = torch.randn(3000, 64), torch.randint(0, 3000, (2, 30000))
    labels = torch.randint(0, 10, (3000,))
    return model, lambda m: F.cross_entropy(m(nodes, edges), labels)


@_model("torch_geometric")
def gat() -> Made:
    return _graph("GAT", heads=4)


@_model("torch_geometric")
def gin() -> Made:
    return _graph("GIN", norm="batch_norm")


def _encoder(width: int, layers: int, batch: int, length: int) -> Made:
    layer = nn.TransformerEncoderLayer(width, 6, 4 * width, batch_first=True, dropout=0.1)
    x = torch.randn(batch, length, width)
    return nn.TransformerEncoder(layer, layers), lambda m: m(x).square().mean()


@_model("torch", transformer=True)
def torch_transformer() -> Made:
    return _encoder(192, 4, 8, 128)


class _Outputs(nn.Module):
    """A recurrent network without its states."""

    def __init__(self, network: nn.RNNBase) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.network(x)[0]
        return outputs


def _recurrent(kind: type[nn.LSTM] | type[nn.GRU]) -> Made:
    x = torch.randn(16, 128, 64)
    return _Outputs(kind(64, 256, 2, batch_first=True)), lambda m: m(x).square().mean()


@_model("torch")
def lstm() -> Made:
    return _recurrent(nn.LSTM)


@_model("torch")
def gru() -> Made:
    return _recurrent(nn.GRU)


class _WaveNet(nn.Module):
    """Dilated convolutions with gates, over raw sound."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, channels, 1)
        self.dilated = nn.ModuleList(
            nn.Conv1d(channels, 2 * channels, 2, dilation=2**level) for level in range(depth)
        )
        self.last = nn.Conv1d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for level, dilated in enumerate(self.dilated):
            signal, gate = dilated(F.pad(h, (2**level, 0))).chunk(2, 1)
            h = h + torch.tanh(signal) * torch.sigmoid(gate)
        out: Tensor = self.last(h)
        return out


def _wavenet(channels: int, depth: int, length: int) -> Made:
    x = torch.randn(4, 1, length)
    return _WaveNet(channels, depth), lambda m: F.mse_loss(m(x), x)


@_model("torch")
def wavenet() -> Made:
    return _wavenet(64, 8, 4096)


class _Clicks(nn.Module):
    """DLRM's shape: numbers and tables of classes, their products two by two, a perceptron."""

    def __init__(self, classes: int, tables: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(classes, width) for _ in range(tables))
        self.numbers = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, numbers: Tensor, classes: Tensor) -> Tensor:
        looked_up = [table(classes[:, i]) for i, table in enumerate(self.tables)]
        rows = torch.stack([self.numbers(numbers), *looked_up], dim=1)
        products = rows @ rows.transpose(1, 2)
        one, other = torch.triu_indices(len(looked_up) + 1, len(looked_up) + 1, 1)
        out: Tensor = self.top(torch.cat([rows[:, 0], products[:, one, other]], dim=1))
        return out.squeeze(1)


@_model("torch")
def recommender() -> Made:
    numbers, classes = torch.randn(4096, 13), torch.randint(0, 1000, (4096, 8))
    clicked = torch.rand(4096).round()
    return _Clicks(1000, 8, 32), lambda m: F.binary_cross_entropy_with_logits(
        m(numbers, classes), clicked
    )


# ------------------------------------------------------------------------------------- smoke run


@_model("torch", transformer=True, into=QUICK)
def tiny_transformer() -> Made:
    return _encoder(48, 2, 4, 64)


@_model("torch", into=QUICK)
def tiny_wavenet() -> Made:
    return _wavenet(16, 3, 1024)


@_model("a_library_that_is_not_there", into=QUICK)
def tiny_absent() -> Made:
    raise AssertionError("its library is looked for first")


# ------------------------------------------------------------------------------- timm's imports


class _Absent(types.ModuleType):
    """A module whose every name is an empty class: enough to be imported from."""

    __path__: Sequence[str] = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":  # of which timm makes a table when it is imported
            modes = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
            return Enum("InterpolationMode", {mode: mode.lower() for mode in modes})
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Inside, timm can be imported where torchvision is not: its models need none of it."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
