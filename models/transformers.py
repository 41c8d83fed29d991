"""Any causal or encoder-decoder model of Hugging Face transformers as a model of ours. The only importer of it.

The model is the child `model`, so our fully qualified names are "model." and transformers' own. Code of a model's
authors that transformers does not contain is never run.

B batch, T tokens, V vocabulary.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    __version__,
    masking_utils,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto import modeling_auto as auto
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as library_logging

from models.assumptions import broken, dropouts, shared_parameters, why_it_sees_too_much
from models.config import ModelConfig
from models.documents import Documents
from models.encoder_decoder import EncoderDecoderInputs
from models.initial_values import PREFIX, drawn_by_units, require_filled
from models.interface import ModelInterface
from models.layout import FREQUENCIES, Copy, Layout, Stored
from models.loss import SummedLoss
from models.tensor_plan import with_plan


class TransformersModel(nn.Module):
    """The contract of models.decoder.Decoder around a model of transformers, which is its child `model`.

    Raises ValueError, with the reason, for a model that breaks an assumption of this file or of parallel/.
    """

    def __init__(self, config: ModelConfig, *, loss_chunks: int = 1, z_loss: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = plain_model(config)
        self.loss = SummedLoss(loss_chunks, z_loss=z_loss)
        plain = _interface_of(self.model)
        if problems := [*broken(self.model, plain, dropout=config.dropout)]:
            raise ValueError("\n".join(problems))
        plan = getattr(self.model.config, "base_model_tp_plan", None)
        self.interface = with_plan(plain, self, settings=config.settings, plan=plan or {})
        """What parallel/ may know of this model."""
        # By name, not in the modules: float8 replaces these.
        self.transposed = frozenset(PREFIX + name for name in _make_linear(self.model))
        """Weights that transformers keeps as (in, out)."""

    @property
    def about(self) -> str:
        """A line for the log."""
        kinds = Counter(type(self.get_submodule(name)).__name__ for name in self.interface.blocks)
        parts = [" + ".join(f"{count} {kind}" for kind, count in kinds.items())]
        parts += [f"{self.model.config._attn_implementation} attention"]
        parts += [f"{len(self.transposed)} Conv1D as linears"] if self.transposed else []
        parts += ["dropout as in config.json"] if self.interface.draws_random else []
        return f"{', '.join(parts)}, in {type(self.model).__name__} of transformers {__version__}"

    def forward(
        self,
        inputs: Tensor | EncoderDecoderInputs,
        targets: Tensor | None = None,
        *,
        documents: Documents | None = None,
    ) -> Tensor:
        """Logits (B, T, V), or, with targets (B, T), their summed loss, a scalar: as Decoder.forward."""
        if isinstance(inputs, EncoderDecoderInputs):
            # The decoder is causal, so what pads the answers comes too late to be seen.
            given: dict[str, Any] = {
                "input_ids": inputs.encoder_tokens,
                "attention_mask": inputs.encoder_mask,
                "decoder_input_ids": inputs.decoder_tokens,
            }
        else:
            given = {"input_ids": inputs}
        if documents is not None:  # positions that start anew are what transformers knows packed texts by
            given["position_ids"] = documents.positions
        with _masks_without_looking(documents):
            logits = self.model(**given, use_cache=False).logits  # (B, T, V)
        return self.loss(logits, targets)

    def _apply(self, function: Any, recurse: bool = True) -> "TransformersModel":
        """Move parameters module by module, as nn.Module does; what modules share stays shared."""
        shared = shared_parameters(self)
        super()._apply(function, recurse)
        for first, *others in shared:
            parameter = self.get_parameter(first)
            for name in others:
                setattr(_parent(self, name), name.rpartition(".")[2], parameter)
        return self

    @torch.no_grad()
    def initial_values(
        self, shapes: Mapping[str, Collection[int]], *, seed: int, device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, whole float32 tensor on the device) of each of these parameters and buffers, as transformers starts.

        Raises ValueError for what transformers leaves without a value.
        """
        with torch.device("meta"):
            twin = plain_model(self.config)
        for name, values in drawn_by_units(twin, self.interface, seed=seed, device=device):
            if (full := PREFIX + name) in shapes:
                require_filled(full, values)
                yield full, values.t().contiguous() if full in self.transposed else values


def require_kernels(config: ModelConfig, *, backend: str) -> None:
    """Raises ValueError for attention.backend of a model that does not call scaled_dot_product_attention."""
    kind = _class_of(library_config(config.settings), config)
    if backend != "auto" and not kind._supports_sdpa:
        raise ValueError(
            f'{kind.__name__} computes attention without kernels of torch; write attention.backend = "auto"'
        )


@cache
def require_causal(config: ModelConfig, *, documents: bool = False) -> None:
    """Raises ValueError for a model whose tokens see later ones, or, with documents, those of other documents."""
    with torch.device("meta"):
        twin = TransformersModel(config)
    if documents and config.is_encoder_decoder:
        raise ValueError(
            f"{type(twin.model).__name__} has an encoder, whose texts are padded, not packed; write"
            " data.document_mask = false"
        )
    with torch.random.fork_rng([]):
        reason = why_it_sees_too_much(twin, vocabulary=config.vocabulary, documents=documents)
    if reason:
        raise ValueError(reason)


@cache
def stored_layout(config: ModelConfig) -> Layout:
    """How transformers stores this model; what several modules share is there once."""
    with torch.device("meta"):
        model = TransformersModel(config)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = dict(model.named_parameters())
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
    computed = [name for name, _ in model.model.named_buffers() if PREFIX + name not in buffers]
    prefix, in_files = model.model.base_model_prefix, _names_in_files(model.model)
    return Layout(
        {
            name: Stored(in_files[name.removeprefix(PREFIX)], tuple(tensor.shape), name in model.transposed)
            for name, tensor in {**tensors, **buffers}.items()
        },
        {
            name: Copy(in_files[name.removeprefix(PREFIX)], of=first)
            for first, *others in shared_parameters(model)
            for name in others
        },
        prefix=prefix if hasattr(model.model, prefix) else "",
        ignored=(
            FREQUENCIES,
            *(model.model._keys_to_ignore_on_load_unexpected or ()),
            *(f"(^|\\.){re.escape(name)}$" for name in computed),
        ),
    )


def _names_in_files(model: PreTrainedModel) -> dict[str, str]:
    """Name in the model -> name in the files of its family, which transformers renames while it reads some of them."""
    tensors = model.state_dict()
    if revert_weight_conversion(model, dict(tensors)).keys() == tensors.keys():
        return {name: name for name in tensors}
    found = {}
    for name, tensor in tensors.items():
        written = revert_weight_conversion(model, {name: tensor})
        if [one.shape for one in written.values()] != [tensor.shape]:
            raise ValueError(f"{name}: transformers puts it together from several tensors of a file")
        found[name] = next(iter(written))
    return found


def library_config(settings: Mapping[str, Any]) -> PreTrainedConfig:
    """What transformers reads from a config.json, with the defaults of its family.

    Raises ValueError if it knows no such family, or refuses the values.
    """
    family = settings.get("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        raise ValueError(f"model_type = {family!r}: transformers {__version__} has no such model")
    try:
        return CONFIG_MAPPING[family].from_dict(dict(settings))
    except Exception as error:  # each family raises errors of its own
        raise ValueError(f"transformers refuses it: {' '.join(str(error).split())}") from None


def classes_of(family: str, *, is_encoder_decoder: bool) -> tuple[str | None, str | None, bool]:
    """The class that trains a family on text, the one without a head, and whether the family also fills gaps."""
    causal, pairs = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    base = auto.MODEL_MAPPING_NAMES.get(family)
    head = (pairs if is_encoder_decoder else causal).get(family)
    return head, base if isinstance(base, str) else None, family in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES


@contextmanager
def _masks_without_looking(documents: Documents | None) -> Iterator[None]:
    """transformers' own masks, without its looks at tensors: do positions start anew in a row, is there any padding?

    For these the host would wait for a GPU, and fake tensors have no values.
    """
    packed = None if documents is None else (documents.positions == 0).cumsum(-1)  # (B, T): number of the document
    theirs = masking_utils._ignore_bidirectional_mask_sdpa

    def ignores(padding: Tensor | None, *more: Any, **named: Any) -> bool:
        return padding is None and theirs(padding, *more, **named)

    with (
        patch.object(masking_utils, "find_packed_sequence_indices", lambda positions: packed),
        patch.object(masking_utils, "_ignore_bidirectional_mask_sdpa", ignores),
    ):
        yield


def plain_model(config: ModelConfig) -> PreTrainedModel:
    """transformers' own model on torch's current device, in float32, without dropout unless the config asks for it."""
    library_logging.set_verbosity_error()  # of notes to its own users, such as on the loss that we do not call
    theirs = library_config(config.settings)
    theirs.use_cache = False
    if not config.dropout:
        _set_dropout_to_zero(theirs)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    attention = "sdpa" if _class_of(theirs, config)._supports_sdpa else "eager"
    model = kind.from_config(theirs, attn_implementation=attention, dtype=torch.float32)
    if not config.tied_embeddings:
        _untie_head(model)
    return cast(PreTrainedModel, model)


def _class_of(theirs: PreTrainedConfig, config: ModelConfig) -> type[PreTrainedModel]:
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if type(theirs) not in kind._model_mapping:
        raise ValueError(
            f"model_type = {theirs.model_type!r}: it is neither a causal nor an encoder-decoder language model"
        )
    return cast(type[PreTrainedModel], kind._model_mapping[type(theirs)])


def _untie_head(model: PreTrainedModel) -> None:
    """Give the output projection a weight of its own. transformers builds every T5 tied, and T5 1.1 is not."""
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone())


def _set_dropout_to_zero(config: PreTrainedConfig) -> None:
    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _set_dropout_to_zero(value)
        elif "drop" in key and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, key, 0.0)


def _make_linear(model: PreTrainedModel) -> list[str]:
    """Replace each Conv1D, a linear whose weight is (in, out), by nn.Linear. Returns the names of their weights."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, module in found.items():
        weight, bias = module.weight, module.bias
        inputs, outputs = weight.shape
        linear = nn.Linear(inputs, outputs, bias=bias is not None, device=weight.device, dtype=weight.dtype)
        linear.weight = nn.Parameter(weight.detach().t().contiguous())
        linear.bias = bias
        model.set_submodule(name, linear)
    return [f"{name}.weight" for name in found]


def _interface_of(model: PreTrainedModel) -> ModelInterface:
    """What parallel/ may know. Repeated blocks are in transformers' own list of what is not to be split."""
    stacks: dict[str, list[str]] = {}
    for name in _outermost(model, set(model._no_split_modules or ())):
        stacks.setdefault(name.rpartition(".")[0], []).append(PREFIX + name)
    kind = type(model).__name__
    if not stacks:
        raise ValueError(f"{kind} does not name its repeated blocks (_no_split_modules)")
    names = {module: PREFIX + name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{kind} has no output projection (get_output_embeddings)")
    model.loss_type = model.loss_type or "ForCausalLM"  # or transformers says that this is its default
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{kind} has a loss of its own, {model.loss_function.__name__}; only cross-entropy is supported"
        )
    for kept, *_ in shared_parameters(model):
        if kept in model.all_tied_weights_keys:
            raise ValueError(f"{kind} stores {kept} as {model.all_tied_weights_keys[kept]}, a name that comes later")
    tied = any(names[head] == PREFIX + name.rpartition(".")[0] for group in shared_parameters(model) for name in group)
    return ModelInterface(
        stacks=tuple(map(tuple, stacks.values())),
        embedding=names[embedding],
        head=None if tied else names[head],
        head_norm=None,
        tied_head=names[head] if tied else None,
        loss="loss",
        inside_block=None,
        skips_uneven=True,
        draws_random=bool(dropouts(model)),
    )


def _outermost(model: nn.Module, classes: Collection[str]) -> list[str]:
    """The names of the modules of these classes in lists, but for those inside of others."""
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        if type(module).__name__ in classes and isinstance(_parent(model, name), nn.ModuleList):
            found.append(name)
    return found


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def read_folder(folder: Path, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of a Hugging Face folder as transformers reads it, to generate with. Code and pickles are refused."""
    library_logging.disable_progress_bar()
    safely: Any = {"local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, **safely)
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=dtype, use_safetensors=True, **safely)
    return cast(PreTrainedModel, model.to(device).eval())


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder as transformers reads it. Code is refused."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
