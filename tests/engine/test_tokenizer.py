"""Loading tokenizers from folders, also from broken and hostile ones."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from nanochat.engine.tokenizer import default_sampling, eos_token_ids, load_tokenizer
from nanochat.errors import ModelNotFound, UnsupportedModel
from tests.tokenizer_zoo import CORPUS, NAMES, TEXTS, make_tokenizer, write_tokenizer

MESSAGES = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "What is the capital of France?"},
]


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


class TestEqualToAutoTokenizer:
    """Families whose files ``AutoTokenizer`` takes as they are."""

    @pytest.mark.parametrize(
        ("name", "model_type", "tokenizer_class"),
        [
            ("qwen3", "qwen3", "Qwen2Tokenizer"),
            ("qwen3", "qwen2", "Qwen2TokenizerFast"),
            ("qwen3", "qwen3_moe", "Qwen2Tokenizer"),
            ("llama3", "llama", "PreTrainedTokenizerFast"),
            ("smollm2", "smollm3", "PreTrainedTokenizerFast"),
            ("llama2", "mistral", "LlamaTokenizer"),
            ("mistral", "mistral", "LlamaTokenizerFast"),
            ("gemma", "gemma3_text", "GemmaTokenizer"),
        ],
    )
    def test_encodes_decodes_and_renders_alike(
        self, tmp_path: Path, name: str, model_type: str, tokenizer_class: str
    ) -> None:
        write_tokenizer(tmp_path, name, tokenizer_class=tokenizer_class)
        write_json(tmp_path / "config.json", {"model_type": model_type})
        ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
        for text in TEXTS + CORPUS[:7]:
            assert ours.encode(text) == theirs.encode(text)
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(
                text, add_special_tokens=False
            )
        rng = random.Random(0)
        for _ in range(100):
            ids = [rng.randrange(len(ours)) for _ in range(10)]
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip
                )
        assert ours.chat_template == theirs.chat_template
        assert ours.special_tokens_map.items() <= theirs.special_tokens_map.items()
        assert ours.clean_up_tokenization_spaces == theirs.clean_up_tokenization_spaces
        rendered = [
            tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
            for tokenizer in (ours, theirs)
        ]
        assert rendered[0] == rendered[1]

    @pytest.mark.parametrize("name", NAMES)
    def test_the_files_are_read_as_they_stand(self, tmp_path: Path, name: str) -> None:
        ours, original = load_tokenizer(write_tokenizer(tmp_path / name, name)), make_tokenizer(name)
        for text in TEXTS + CORPUS[:7]:
            assert ours.encode(text) == original.encode(text)

    def test_a_template_in_a_file_of_its_own_comes_first(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path, "qwen3")
        (tmp_path / "chat_template.jinja").write_text("from the file")
        assert load_tokenizer(tmp_path).chat_template == "from the file"

    def test_older_files_alone(self, tmp_path: Path) -> None:
        backend = json.loads(make_tokenizer("smollm2").backend_tokenizer.to_str())
        write_json(tmp_path / "vocab.json", backend["model"]["vocab"])
        merges = "\n".join(" ".join(pair) for pair in backend["model"]["merges"])
        (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
        write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
        write_json(tmp_path / "config.json", {"model_type": "gpt2"})
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.decode(tokenizer.encode("The capital of France")) == "The capital of France"


def test_settings_of_the_training_run_neither_cut_nor_pad(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "qwen3")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    content["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    write_json(tmp_path / "tokenizer.json", content)
    tokenizer = load_tokenizer(tmp_path)
    text = "The capital of France is Paris."
    assert tokenizer.backend_tokenizer.encode(text).ids == make_tokenizer("qwen3").encode(text)


@pytest.mark.parametrize("value", ["many", [1], None, -1, 8])
def test_a_length_of_whatever_kind_limits_nothing(tmp_path: Path, value: object) -> None:
    write_tokenizer(tmp_path, "qwen3", model_max_length=value)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("many words " * 50) == make_tokenizer("qwen3").encode("many words " * 50)


def test_a_long_text_logs_nothing(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "qwen3", model_max_length=8)
    code = "import sys; from pathlib import Path; from nanochat.engine.tokenizer import load_tokenizer\n"
    code += "load_tokenizer(Path(sys.argv[1])).encode('many words ' * 50)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "longer than" not in finished.stderr


class TestBrokenFolders:
    """A sentence for each, no traceback, no code run."""

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match="no model folder"):
            load_tokenizer(tmp_path / "missing")

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        write_json(tmp_path / "config.json", {"model_type": "llama"})
        with pytest.raises(ModelNotFound, match="incomplete"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"{",
            b"[]",
            b"{}",
            b"\xff\xfe",
            b'{"model": 1}',
            b"[" * 200_000,
            b'{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}',
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 11422654\n",
        ],
    )
    def test_a_tokenizer_file_that_is_none(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(UnsupportedModel, match="can't be read") as caught:
            load_tokenizer(tmp_path)
        assert len(str(caught.value)) < 600
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize("content", [b"{", b"[]", b"3", b'{"extra_special_tokens": 3}', b'{"encode": 1}'])
    def test_settings_that_are_none(self, tmp_path: Path, content: bytes) -> None:
        write_tokenizer(tmp_path, "qwen3")
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(UnsupportedModel):
            load_tokenizer(tmp_path)

    def test_code_in_the_folder_is_never_run(self, tmp_path: Path) -> None:
        (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
        settings: dict[str, Any] = {
            "tokenizer_class": "Evil",
            "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
        }
        write_tokenizer(tmp_path, "qwen3", **settings)
        write_json(tmp_path / "config.json", {"model_type": "llama"} | settings)
        load_tokenizer(tmp_path)
        (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.json")
        with pytest.raises(ModelNotFound, match="no tokenizer"):  # merges.txt is missing
            load_tokenizer(tmp_path)
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
        with pytest.raises(UnsupportedModel, match="code that comes with the model"):
            load_tokenizer(tmp_path)
        assert not (tmp_path / "ran").exists()


class TestEndOfAnswer:
    """The ids that end an answer come from three places."""

    def test_all_are_found(self, tmp_path: Path) -> None:
        tokenizer = make_tokenizer("qwen3")
        write_json(tmp_path / "generation_config.json", {"eos_token_id": [3, 4]})
        write_json(tmp_path / "config.json", {"eos_token_id": 5, "text_config": {"eos_token_id": [6]}})
        assert eos_token_ids(tmp_path, tokenizer) == {3, 4, 5, 6, tokenizer.eos_token_id}

    @pytest.mark.parametrize("value", [None, True, "2", -1, [None, "x"], {"a": 1}, 2.5])
    def test_what_is_no_id_is_none(self, tmp_path: Path, value: object) -> None:
        tokenizer = make_tokenizer("qwen3")
        write_json(tmp_path / "generation_config.json", {"eos_token_id": value})
        assert eos_token_ids(tmp_path, tokenizer) == {tokenizer.eos_token_id}

    def test_the_end_of_the_templates_turn(self, tmp_path: Path) -> None:
        """A chat model whose files name only the base model's end."""
        tokenizer = make_tokenizer("qwen3", eos_token="<|endoftext|>")
        names = tokenizer.convert_ids_to_tokens(sorted(eos_token_ids(tmp_path, tokenizer)))
        assert names == ["<|endoftext|>", "<|im_end|>"]

    def test_none_at_all(self, tmp_path: Path) -> None:
        tokenizer = make_tokenizer("qwen3", eos_token=None, chat_template=None)
        assert eos_token_ids(tmp_path, tokenizer) == frozenset()

    def test_a_broken_template_has_no_end(self, tmp_path: Path) -> None:
        tokenizer = make_tokenizer("qwen3", eos_token=None, chat_template="{{ nothing.at.all }}")
        assert eos_token_ids(tmp_path, tokenizer) == frozenset()

    def test_a_broken_file(self, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text("{")
        with pytest.raises(ModelNotFound, match="not valid JSON"):
            eos_token_ids(tmp_path, make_tokenizer("qwen3"))


class TestDefaultSampling:
    """What ``generation_config.json`` recommends."""

    def test_only_what_is_there_and_usable(self, tmp_path: Path) -> None:
        assert default_sampling(tmp_path) == {}
        write_json(
            tmp_path / "generation_config.json",
            {"do_sample": True, "temperature": 1, "top_k": 20.0, "top_p": 1.5, "min_p": None}
            | {"repetition_penalty": float("nan"), "max_length": 20},
        )
        assert default_sampling(tmp_path) == {"temperature": 1.0, "top_k": 20}

    def test_greedy(self, tmp_path: Path) -> None:
        write_json(tmp_path / "generation_config.json", {"do_sample": False, "temperature": 0.6})
        assert default_sampling(tmp_path) == {"temperature": 0.0}
