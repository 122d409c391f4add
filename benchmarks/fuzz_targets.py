"""Files that nanochat reads, whole ones to damage, and what reading each of them means.

Each target knows how to write a damaged copy and how to use it as far as a user would: a model folder is
loaded and asked, a history is listed, searched and written to.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from benchmarks.fuzz_mutations import damage_bytes, damage_json, damage_template, damage_toml, damage_value
from benchmarks.random_model import SHAPES, write_random_model
from nanochat import Engine, EngineConfig, SamplingParams
from nanochat.conversation import Conversation
from nanochat.history import History
from nanochat.history.transfer import parse_json
from nanochat.settings import load_settings
from nanochat.stray_output import diverted

ANSWER_S = 30.0
SHAPE = SHAPES["tiny"] | {"vocab_size": 320}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SETTINGS = b"""system = "Be brief."

[engine]
device = "cpu"
num_kv_blocks = 16
max_model_len = 256

[sampling]
temperature = 0.5
top_p = 0.9
stop = ["END"]
"""
_EVIL_MODULE = "open('canary', 'w').close()\n"
_SQL = (
    "PRAGMA user_version = {number}",
    "PRAGMA application_id = {number}",
    "UPDATE messages SET parent_id = id",
    "UPDATE messages SET parent_id = (SELECT max(id) FROM messages)",
    "UPDATE messages SET chat_id = {number}",
    "UPDATE messages SET metrics = '{text}'",
    "UPDATE messages SET token_ids = x'010203'",
    "UPDATE messages SET token_ids = zeroblob({number} % 1000000)",
    "UPDATE messages SET text = CAST(x'ff1b5b324a00' AS TEXT)",
    "UPDATE messages SET text = '{text}', state = 'streaming', session_id = {number}",
    "UPDATE messages SET created_at = 9e999, finished_at = -9e999",
    "UPDATE messages SET active_child_id = {number}",
    "UPDATE chats SET sampling = '{text}'",
    "UPDATE chats SET title = '{text}', system = '{text}'",
    "UPDATE chats SET tab_session = {number}, tab_position = {number}",
    "UPDATE chats SET created_at = 9e999, updated_at = 1e300",
    "UPDATE chats SET left_out_id = {number}",
    "UPDATE chats SET id = {number}",
    "UPDATE sqlite_sequence SET seq = {number}",
    "DELETE FROM chats",
    "DELETE FROM sessions",
    "DROP TABLE message_index",
    "DROP TABLE sessions",
    "DROP TRIGGER message_added",
    "ALTER TABLE chats RENAME TO other",
    "ALTER TABLE messages ADD COLUMN more TEXT",
    "DROP TABLE chats; CREATE VIEW chats AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) "
    "SELECT id, 't' AS title, NULL AS system, '' AS model, '{{}}' AS sampling, NULL AS left_out_id, 0 AS "
    "created_at, 0 AS updated_at, 1 AS tab_session, 1 AS tab_position, NULL AS active_child_id FROM n",
    "CREATE TRIGGER evil AFTER INSERT ON messages BEGIN DELETE FROM messages; END",
    "CREATE TRIGGER evil AFTER INSERT ON sessions BEGIN WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT "
    "i + 1 FROM n) INSERT INTO chats SELECT i, '', NULL, '', '', 0, 0, 0, NULL, NULL, NULL FROM n; END",
    "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = replace(sql, 'TEXT', 'BLOB')",
    "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = 'CREATE TABLE x(y)' WHERE name = 'chats'",
    "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET rootpage = {number} WHERE name = 'messages'",
    "PRAGMA writable_schema = ON; DELETE FROM sqlite_schema WHERE name LIKE 'message_index%'",
)


class Bases:
    """Whole files to damage, written once into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_random_model(folder / "model", SHAPE)
        self.gguf = folder / "model.gguf"
        self.history = folder / "history.db"
        _join_shards(self.model)
        _add_chat_files(self.model)
        _write_gguf(self.model, self.gguf)
        self.chat_json = _write_history(self.history)
        self.originals = {path.name: path.read_bytes() for path in self.model.iterdir()}


def _add_chat_files(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[0],
        "eos_token": special[2],
        "pad_token": special[0],
        "chat_template": TEMPLATE,
        "model_max_length": 256,
    }
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    generation = {
        "eos_token_id": [258, 256],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "do_sample": True,
    }
    (model / "generation_config.json").write_text(json.dumps(generation))
    (model / "modeling_evil.py").write_text(_EVIL_MODULE)
    (model / "tokenization_evil.py").write_text(_EVIL_MODULE)


def _join_shards(model: Path) -> None:
    """Weights in one file, as most small models have them: the damages are made for that."""
    tensors = {}
    for shard in sorted(model.glob("*.safetensors")):
        tensors.update(load_file(shard))
        shard.unlink()
    (model / "model.safetensors.index.json").unlink()
    save_file(tensors, model / "model.safetensors")


def _write_gguf(model: Path, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "qwen3")
    for key, value in {
        "block_count": SHAPE["num_hidden_layers"],
        "context_length": 256,
        "embedding_length": SHAPE["hidden_size"],
        "feed_forward_length": SHAPE["intermediate_size"],
        "attention.head_count": SHAPE["num_attention_heads"],
        "attention.head_count_kv": SHAPE["num_key_value_heads"],
        "attention.key_length": SHAPE["head_dim"],
        "attention.value_length": SHAPE["head_dim"],
    }.items():
        writer.add_uint32(f"qwen3.{key}", value)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen3.rope.freq_base", 1e6)
    vocab = json.loads((model / "tokenizer.json").read_text())
    tokens = sorted(vocab["model"]["vocab"], key=vocab["model"]["vocab"].__getitem__)
    tokens += [entry["content"] for entry in vocab["added_tokens"]]
    tokens += ["ab", *(f"<unused{index}>" for index in range(SHAPE["vocab_size"] - len(tokens) - 1))]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "qwen2")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [1] * 256 + [3] * 3 + [1] * (len(tokens) - 259))
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 258)
    writer.add_string("tokenizer.chat_template", TEMPLATE)
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, tensor in load_file(model / "model.safetensors").items():
        target = names.get(name) or _gguf_layer_name(name)
        writer.add_tensor(target, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_layer_name(name: str) -> str:
    layer, rest = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    part = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }.get(rest) or rest.replace("self_attn.", "attn_").removesuffix("_proj")
    return f"blk.{layer}.{part}.weight"


def _write_history(path: Path) -> str:
    with History(path) as history:
        for number in range(3):
            chat = history.create_chat(f"Chat {number}", system="Be brief.", sampling={"temperature": 0.5})
            parent = None
            for turn in range(4):
                parent = history.add_message(chat, parent, f"question {turn} of {number}")
                parent = history.begin_answer(chat, parent, "model")
                history.finish_answer(parent, text="an answer", token_ids=[1, 2, 3], finish_reason="stop")
        history.save_tabs([chat])
        history.flush()
        exported = history.export_json(chat)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return exported


class Target:
    """One kind of file. ``write`` makes the damaged file number ``index``; ``use`` reads it."""

    def __init__(
        self, write: Callable[[random.Random, Bases, Path], None], use: Callable[[Bases, Path], None]
    ) -> None:
        self.write = write
        self.use = use


def _model_file(name: str, damage: Callable[[random.Random, bytes], bytes]) -> Target:
    def write(rng: random.Random, bases: Bases, work: Path) -> None:
        for other, data in bases.originals.items():
            if not (work / other).exists():
                (work / other).write_bytes(data)
        (work / name).write_bytes(damage(rng, bases.originals.get(name, b"{}")))

    def use(bases: Bases, work: Path) -> None:
        try:
            ask_model(work)
        finally:
            for path in work.iterdir():  # put back what was damaged, and nothing else, for the next one
                original = bases.originals.get(path.name)
                if path.name == name or original is None:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    return Target(write, use)


def ask_model(path: Path) -> None:
    """Load the model and hold two turns with it."""
    config = EngineConfig(
        model=str(path),
        device="cpu",
        num_kv_blocks=16,
        max_num_seqs=2,
        max_num_batched_tokens=256,
    )
    log = path.parent / "stray.log"
    with diverted(log):  # as in the app all the time, and in `nanochat ask` until the answer begins
        engine = Engine(config)
    with engine:
        sampling: dict[str, Any] = {**engine.default_sampling, "max_tokens": 3}
        params = SamplingParams(**sampling)
        chat = Conversation(engine.tokenizer, system="Be brief.")
        for text in ("Hello aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", "\u00e9\U0001f40d and so on"):
            chat.add_user(text)
            with diverted(log):
                handle = engine.submit(chat.prompt_ids(), params)
            chat.add_assistant(handle.result(ANSWER_S))
        str(chat.reasoning_tags), str(chat.opens_reasoning)


def _damage_json_bytes(rng: random.Random, data: bytes) -> bytes:
    return damage_json(rng, json.loads(data))


def _damage_tokenizer_config(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.4:
        return _damage_json_bytes(rng, data)
    settings = json.loads(data)
    settings["chat_template"] = damage_template(rng, settings["chat_template"])
    return json.dumps(settings).encode()


def _damage_safetensors(rng: random.Random, data: bytes) -> bytes:
    length = struct.unpack("<Q", data[:8])[0]
    if rng.random() < 0.5:
        return damage_bytes(rng, data, 8 + length)
    header = json.dumps(damage_value(rng, json.loads(data[8 : 8 + length])))
    text = header.encode("utf-8", errors="surrogatepass")
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def _damage_index(rng: random.Random, _: bytes) -> bytes:
    names = ["model.safetensors", "../model.safetensors", "/etc/passwd", "sub/model.safetensors", "a.bin"]
    names += [
        "..",
        "",
        "\x00.safetensors",
        "x" * 300 + ".safetensors",
        "model.safetensors/../../b.safetensors",
    ]
    weight_map = {f"tensor.{number}": rng.choice(names) for number in range(rng.randint(1, 3))}
    return damage_json(rng, {"metadata": {"total_size": 1}, "weight_map": weight_map})


def _write_damaged_gguf(rng: random.Random, bases: Bases, work: Path) -> None:
    data = bases.gguf.read_bytes()
    header = len(data) - sum(len(value) for name, value in bases.originals.items() if "safetensors" in name)
    (work / "model.gguf").write_bytes(damage_bytes(rng, data, max(header, 4000)))


def _use_gguf(_: Bases, work: Path) -> None:
    os.environ["NANOCHAT_CACHE_DIR"] = str(work / "cache")
    try:
        ask_model(work / "model.gguf")
    finally:
        shutil.rmtree(work / "cache", ignore_errors=True)


def _write_damaged_history(rng: random.Random, bases: Bases, work: Path) -> None:
    path = work / "history.db"
    for old in work.iterdir():
        old.unlink()
    data = bases.history.read_bytes()
    if rng.random() < 0.5:
        end = rng.choice((100, 4096, len(data)))
        path.write_bytes(damage_bytes(rng, data, end))
        return
    path.write_bytes(data)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.create_function("segmented", 1, str)
        for statement in rng.sample(_SQL, rng.randint(1, 3)):
            text = rng.choice(
                ("", "{", "[1]", "null", '{"a": NaN}', '{"ttft_s": "x"}', "x" * 100_000, "\x1b")
            )
            number = rng.choice((-1, 0, 1, 2, 99, 2**31, 2**63 - 1))
            try:
                connection.executescript(statement.format(number=number, text=text))
            except sqlite3.Error:
                continue  # the file refuses this damage


def _use_history(_: Bases, work: Path) -> None:
    with History(work / "history.db") as history:
        history.restore_tabs()
        for chat in history.list_chats():
            history.tree(chat.id)
            history.path(chat.id)
            history.export_markdown(chat.id)
            history.export_json(chat.id)
        history.search("question")
        new = history.create_chat("New")
        history.add_message(new, None, "text")
        history.save_tabs([new])
        history.flush()


def _use_settings(_: Bases, work: Path) -> None:
    settings = load_settings(work / "config.toml")
    settings.engine_config({})
    settings.sampling_params({}, {})


def _use_chat_json(_: Bases, work: Path) -> None:
    data = (work / "chat.json").read_bytes()
    parse_json(data)
    with History(None) as history:
        chat = history.import_json(data)
        history.export_markdown(chat)
        history.export_json(chat)


def _file(name: str, write: Callable[[random.Random, Bases], bytes]) -> Callable[..., None]:
    def write_file(rng: random.Random, bases: Bases, work: Path) -> None:
        (work / name).write_bytes(write(rng, bases))

    return write_file


TARGETS: dict[str, Target] = {
    "config.json": _model_file("config.json", _damage_json_bytes),
    "tokenizer.json": _model_file("tokenizer.json", _damage_json_bytes),
    "tokenizer_config.json": _model_file("tokenizer_config.json", _damage_tokenizer_config),
    "generation_config.json": _model_file("generation_config.json", _damage_json_bytes),
    "safetensors": _model_file("model.safetensors", _damage_safetensors),
    "index": _model_file("model.safetensors.index.json", _damage_index),
    "gguf": Target(_write_damaged_gguf, _use_gguf),
    "history": Target(_write_damaged_history, _use_history),
    "settings": Target(_file("config.toml", lambda rng, _: damage_toml(rng, SETTINGS)), _use_settings),
    "chat.json": Target(
        _file("chat.json", lambda rng, bases: damage_json(rng, json.loads(bases.chat_json))), _use_chat_json
    ),
}
