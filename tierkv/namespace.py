"""A fingerprint of everything that decides what a block's bytes mean.

Two caches share blocks only if their digests are equal, so whatever changes the bytes must be in
here, and what does not (a label, padding, the alignment of hits) must not. Computed once, stored
with the blocks, checked at open. Pure but for `fingerprint_of_model_dir`, which reads a model's
folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tierkv import hashing
from tierkv.errors import ConfigError
from tierkv.layout import Layout

FORMAT_VERSION: Final = 1
"""Version of what tierkv puts on media and of how this fingerprint is made."""

_NOT_MEANING: Final = ("padded_block_bytes", "draft")
"""Fields of a group that say how an engine allocates or looks up, not what the bytes are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that decides what bytes mean, for one rank.

    layout: the group table and the hash unit.
    model: name of the model.
    identity: which weights: a revision, or `fingerprint_of_model_dir`. Never empty: a name alone
        does not say which weights made the bytes.
    kv_config: the model's configuration as far as it may change KV (`kv_config_of`).
    kv_dtype, quantization: of the cache, in the engine's words.
    pages: physical layout and packing of pages, in the engine's words.
    tp_size, pp_size, cp_size and the ranks: tensor, pipeline and context parallelism.
    topology_free: group name to block bytes, for groups whose bytes are the same on every tensor
        parallel rank and at every size (MLA latents). Where every reusable group is declared, the
        tensor parallel size and rank do not count. The bytes are what every rank must have; a
        layout that says otherwise is refused.
    hash_algorithm, hash_root: how blocks are named.
    salt: the user's own; another text shares nothing.
    max_tokens, length_dependent: the longest context, which counts only where KV depends on it
        (`is_length_dependent`).

    Raises `ConfigError` in one line for what cannot be.
    """

    layout: Layout
    model: str
    identity: str
    kv_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    kv_dtype: str = ""
    quantization: str = ""
    pages: str = ""
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    topology_free: Mapping[str, int] = field(default_factory=dict, hash=False)
    hash_algorithm: str = hashing.ALGORITHM
    hash_root: bytes = hashing.ROOT
    salt: str = ""
    max_tokens: int = 0
    length_dependent: bool = False
    format_version: int = FORMAT_VERSION
    digest: bytes = field(init=False, compare=False, repr=False)
    """SHA-256 (32 bytes) of the canonical JSON of all that counts."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("namespace: model is empty; write the model's name")
        if not self.identity:
            raise ConfigError(
                f"namespace: model {self.model!r} has no identity; write a revision, or the "
                "fingerprint of its folder (the name alone does not say which weights)"
            )
        for axis in ("tp", "pp", "cp"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            if size < 1 or not 0 <= rank < size:
                raise ConfigError(
                    f"namespace: {axis}_rank {rank} of {axis}_size {size}; write a size of 1 or "
                    "more and a rank below it"
                )
        self._check_declared()
        object.__setattr__(self, "digest", hashlib.sha256(self._canonical().encode()).digest())

    def _check_declared(self) -> None:
        for name, nbytes in self.topology_free.items():
            ours = self.layout.groups[self.layout.index_of(name)].block_bytes
            if ours != nbytes:
                raise ConfigError(
                    f"namespace: group {name!r} is declared topology-free with {nbytes} bytes a "
                    f"block, but has {ours} at tp_size {self.tp_size}; declare only groups whose "
                    "blocks are equal on every rank"
                )

    def _canonical(self) -> str:
        facts = self._facts()
        try:
            return json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as exc:
            raise ConfigError(
                f"namespace: kv_config of {self.model!r} is not plain JSON ({exc}); keep numbers, "
                "texts, lists and objects"
            ) from exc

    def _facts(self) -> dict[str, Any]:
        facts = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.init and f.name not in ("layout", "topology_free", "length_dependent")
        }
        facts["layout"] = {
            "unit": self.layout.hash_block_tokens,
            "groups": [
                {k: v for k, v in group.items() if k not in _NOT_MEANING}
                for group in self.layout.to_dict()["groups"]
            ],
        }
        facts["hash_root"] = self.hash_root.hex()
        facts["kv_config"] = _plain(self.kv_config)
        if not self.length_dependent:
            del facts["max_tokens"]
        if self.is_topology_free:
            del facts["tp_size"], facts["tp_rank"]
        return facts

    @property
    def is_topology_free(self) -> bool:
        """Whether every reusable group is declared equal on all tensor parallel ranks."""
        return all(g.name in self.topology_free for g in self.layout.groups if g.reusable)

    @property
    def text(self) -> str:
        """One readable line for people who look into a store; never compared."""
        parts = [f"{self.model}@{self.identity}"]
        parts += [f"{k}={v}" for k, v in (("dtype", self.kv_dtype), ("salt", self.salt)) if v]
        for axis in ("tp", "pp", "cp"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            if size > 1 and not (axis == "tp" and self.is_topology_free):
                parts.append(f"{axis}={rank}/{size}")
        return " ".join(parts)

    def for_rank(self, *, tp_rank: int = 0, pp_rank: int = 0, cp_rank: int = 0) -> Namespace:
        """The namespace of another rank of the same engine."""
        return dataclasses.replace(self, tp_rank=tp_rank, pp_rank=pp_rank, cp_rank=cp_rank)

    @classmethod
    def of_text(cls, text: str, layout: Layout, *, salt: str = "") -> Namespace:
        """A namespace whose identity the user states: ``my-model@rev1``.

        Everything that tierkv cannot see (dtype, RoPE, parallelism) is for the user to put in the
        text. `ConfigError` where it has no ``@`` and something on both sides of the last one.
        """
        model, at, identity = text.rpartition("@")
        if not (at and model and identity):
            raise ConfigError(
                f"namespace {text!r}: write model@revision; another revision of one name must "
                "not share blocks"
            )
        return cls(layout=layout, model=model, identity=identity, salt=salt)


def _plain(value: Any) -> Any:
    """Mappings as dicts and tuples as lists, so that equal configurations have equal JSON."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


# What of a model's configuration may change KV. -------------------------------------------------

_COSMETIC_WORDS: Final = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path name_or_path
    transformers_version use_cache return_dict output_attentions output_hidden_states torchscript
    finetuning_task id2label label2id problem_type task_specific_params tokenizer_class
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id begin_suppress_tokens suppress_tokens bad_words_ids
    prefix do_sample early_stopping exponential_decay_length_penalty length_penalty max_length
    max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams diversity_penalty
    encoder_no_repeat_ngram_size num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate temperature top_k top_p typical_p
    initializer_range attention_dropout hidden_dropout embd_pdrop attn_pdrop resid_pdrop
    gradient_checkpointing router_aux_loss_coef router_jitter_noise output_router_logits
    chunk_size_feed_forward
"""
COSMETIC: Final = frozenset(_COSMETIC_WORDS.split())
"""Fields of a Hugging Face configuration that never change KV: labels, sampling, training."""


def kv_config_of(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration less what never changes KV, nested configurations included.

    A field that is not known to be cosmetic stays: an unneeded miss is cheap, a wrong byte is not.
    """
    kept: dict[str, Any] = {}
    for key, value in hf_config.items():
        if key in COSMETIC:
            continue
        kept[key] = kv_config_of(value) if isinstance(value, Mapping) else value
    return kept


_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope", "su")


def is_length_dependent(hf_config: Mapping[str, Any]) -> bool:
    """Whether the same tokens get other KV under another maximal length (RoPE that looks at it)."""
    for key, value in hf_config.items():
        if key in ("rope_type", "type") and value in _LENGTH_DEPENDENT_ROPE:
            return True
        if isinstance(value, Mapping) and is_length_dependent(value):
            return True
    return False


# Weights without a revision. ---------------------------------------------------------------------

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_HEADER_LIMIT: Final = 64 << 20


def fingerprint_of_model_dir(path: str | Path) -> str:
    """An identity for a local model without a revision: ``dir-`` and 32 hex digits.

    Covers what of `config.json` may change KV, and each weight file's name, size, header and
    sixteen samples of 4 KiB (two fine-tunes of one model have equal headers). Blocking; reads a few
    hundred KiB. `ConfigError` where there is no configuration or no weight file.
    """
    folder = Path(path)
    try:
        config = json.loads((folder / "config.json").read_text())
        files = sorted(p for p in folder.iterdir() if p.suffix in _WEIGHTS and p.is_file())
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"model folder {folder}: config.json cannot be read ({exc}); write an identity for "
            "the model yourself"
        ) from exc
    if not files or not isinstance(config, dict):
        raise ConfigError(
            f"model folder {folder}: no weight files ({', '.join(_WEIGHTS)}) to tell which weights "
            "these are; write an identity for the model yourself"
        )
    digest = hashlib.sha256(json.dumps(kv_config_of(config), sort_keys=True).encode())
    for file in files:
        for part in _telling_parts(file):
            digest.update(len(part).to_bytes(8, "little") + part)
    return f"dir-{digest.hexdigest()[:32]}"


def _telling_parts(file: Path) -> Iterator[bytes]:
    """Name, size, header and samples of one weight file."""
    nbytes = file.stat().st_size
    yield file.name.encode()
    yield nbytes.to_bytes(8, "little")
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            header = int.from_bytes(opened.read(8), "little")
            yield opened.read(min(header, nbytes, _HEADER_LIMIT))
        for sample in range(_SAMPLES):
            opened.seek(max(0, nbytes - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            yield opened.read(_SAMPLE_BYTES)
