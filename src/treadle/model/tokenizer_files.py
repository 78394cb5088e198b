"""A tokenizer's files in a Hugging Face model directory: reading them as Transformers 5 does, and writing them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from treadle.config import UserError
from treadle.config.files import MAX_JSON_BYTES, json_bytes, read_json, write_atomically
from treadle.model.tokenizer import Tokenizer
from treadle.model.tokenizer_spm import read_sentencepiece

MAX_TOKENIZER_BYTES = 512 << 20
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face model directory. Raises UserError naming the file that is wrong.

    As in Transformers 5, tokenizer.json decides which of BOS and EOS are added; the older flags in
    tokenizer_config.json count only where there is no tokenizer.json.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a Hugging Face model directory")
    config = read_json(folder / "tokenizer_config.json") or {}
    named = {role: text for role in ROLES if (text := _token_text(config.get(role))) is not None}
    for role, token in (read_json(folder / "special_tokens_map.json") or {}).items():
        if role in ROLES and role not in config and (text := _token_text(token)) is not None:
            named[role] = text
    backend, found = _read_backend(folder, config)
    named = found | named
    _add_missing_tokens(backend, config, named, folder)
    return Tokenizer(
        backend,
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        pad_token=named.get("pad_token"),
        unk_token=named.get("unk_token"),
        extra_eos_ids=_generation_eos(folder),
        chat_templates=_chat_templates(folder, config),
        config=config,
    )


def _token_text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_backend(folder: Path, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Return the backend, and the named tokens that its own file knows of."""
    path = folder / "tokenizer.json"
    if path.is_file():
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise UserError(f"{path} is larger than {MAX_TOKENIZER_BYTES >> 20} MiB, too large for a tokenizer")
        try:
            return tokenizers.Tokenizer.from_file(str(path)), {}
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} is not a valid tokenizer: {error}; download it again") from error
    older = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()]
    if not older and not (folder / "tokenizer_config.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json; copy the tokenizer's files into it")
    if older[:1] == ["tokenizer.model"] and (model := read_sentencepiece(folder / "tokenizer.model")) is not None:
        adds = {role: config.get(f"add_{role}_token", role == "bos") for role in ("bos", "eos")}
        named = {role: _token_text(config.get(role)) or text for role, text in model.named.items()}
        set_bos_eos(
            model.backend,
            named.get("bos_token") if adds["bos"] else None,
            named.get("eos_token") if adds["eos"] else None,
        )
        return model.backend, model.named
    return _read_slow_backend(folder), {}


def _read_slow_backend(folder: Path) -> tokenizers.Tokenizer:
    """Let Transformers convert older files; this costs seconds, so it is said."""
    print(f"{folder} has no tokenizer.json: Transformers converts its older tokenizer files", file=sys.stderr)
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(
            f"the tokenizer files in {folder} cannot be read ({' '.join(str(error).split())}); add a tokenizer.json"
        ) from error
    backend = getattr(found, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UserError(f"the tokenizer in {folder} is written in Python; convert it to a tokenizer.json first")
    return backend


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str], folder: Path
) -> None:
    """Add the tokens that only the configuration lists, and mark the named ones as special."""
    have = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
    decoder = config.get("added_tokens_decoder")
    listed = sorted(decoder.items(), key=lambda item: _as_index(item[0], folder)) if isinstance(decoder, dict) else []
    for key, token in listed:
        text = _token_text(token)
        if text is None or have.get(int(key)) == text:
            continue
        flags = {name: bool(token.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        backend.add_tokens([AddedToken(text, **flags)])
        if backend.token_to_id(text) != int(key):
            raise UserError(
                f"{folder / 'tokenizer_config.json'} gives '{text}' the id {key} but tokenizer.json makes it "
                f"{backend.token_to_id(text)}; the two files are of different models"
            )
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    listed = [config.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
    others = [_token_text(token) for tokens in listed if isinstance(tokens, list) for token in tokens]
    wanted = dict.fromkeys(text for text in [*named.values(), *others] if text is not None)
    missing = [AddedToken(text, special=True, normalized=False) for text in wanted if text not in special]
    if missing:
        backend.add_special_tokens(missing)


def _as_index(key: str, folder: Path) -> int:
    if not key.isdigit():
        raise UserError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder has the key '{key}', not an id")
    return int(key)


def set_bos_eos(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `backend` put the token `bos` before and `eos` after each encoded text, where given."""
    single = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
    pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    tokens = [(token, backend.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)  # pyrefly: ignore


def _generation_eos(folder: Path) -> list[int]:
    """The ids that end a generation, from generation_config.json or, where it names none, config.json."""
    for name in ("generation_config.json", "config.json"):
        ids = (read_json(folder / name) or {}).get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(index, int) and index >= 0 for index in ids):
            raise UserError(f"{folder / name}: eos_token_id is {ids}, not an id or a list of ids")
        return ids
    return []


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Every chat template of the directory by name; a file wins over the configuration, as in Transformers."""
    templates: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        for entry in given:
            if (
                isinstance(entry, dict)
                and isinstance(entry.get("name"), str)
                and isinstance(entry.get("template"), str)
            ):
                templates[entry["name"]] = entry["template"]
    if (legacy := read_json(folder / "chat_template.json")) and isinstance(legacy.get("chat_template"), str):
        templates["default"] = legacy["chat_template"]
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            if path.stat().st_size > MAX_JSON_BYTES:
                raise UserError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB, too large for a chat template")
            try:
                templates[name] = path.read_text("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path} is not UTF-8 text: {error}") from error
    return templates


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and the chat templates into `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in tokenizer.config.items() if key not in ("chat_template", "auto_map")}
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    config.setdefault("clean_up_tokenization_spaces", False)
    names = {role: text for role in ROLES if (text := getattr(tokenizer, role)) is not None}
    for role, text in names.items():
        if _token_text(config.get(role)) != text:
            config[role] = text
    write_atomically(folder / "tokenizer_config.json", json_bytes(config))
    write_atomically(folder / "special_tokens_map.json", json_bytes(names))
    write_atomically(folder / "tokenizer.json", tokenizer.backend.to_str(pretty=False).encode())
    for name, template in tokenizer.chat_templates.items():
        path = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{Path(name).name}.jinja"
        write_atomically(folder / path, template.encode())
    if set(tokenizer.eos_ids) - set(_generation_eos(folder)) - {tokenizer.token_to_id(tokenizer.eos_token or "")}:
        # Further tokens that end a generation have their place in this file, which the model's other settings share.
        generation = read_json(folder / "generation_config.json") or {}
        write_atomically(
            folder / "generation_config.json", json_bytes(generation | {"eos_token_id": list(tokenizer.eos_ids)})
        )
