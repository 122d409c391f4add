"""Addresses and keys, before anything is sent."""

from __future__ import annotations

import sys

import pytest

from nanochat.backend.opening import open_backend
from nanochat.backend.remote.config import RemoteConfig
from nanochat.errors import InvalidOption, NanochatError


@pytest.mark.parametrize(
    ("url", "base", "metrics", "place"),
    [
        (
            "http://localhost:8000",
            "http://localhost:8000/v1",
            "http://localhost:8000/metrics",
            "localhost:8000",
        ),
        (
            "http://localhost:8000/",
            "http://localhost:8000/v1",
            "http://localhost:8000/metrics",
            "localhost:8000",
        ),
        (" https://a.b \n", "https://a.b/v1", "https://a.b/metrics", "a.b"),
        ("https://a.b/v1/", "https://a.b/v1", "https://a.b/metrics", "a.b"),
        ("https://a.b/team/v1", "https://a.b/team/v1", "https://a.b/team/metrics", "a.b/team"),
        ("http://[::1]:30000", "http://[::1]:30000/v1", "http://[::1]:30000/metrics", "[::1]:30000"),
        ("https://a.b/api/v3", "https://a.b/api/v3", "https://a.b/api/v3/metrics", "a.b/api/v3"),
    ],
)
def test_addresses(url: str, base: str, metrics: str, place: str) -> None:
    config = RemoteConfig(url=url)
    assert (config.base_url, config.metrics_url, config.place) == (base, metrics, place)


@pytest.mark.parametrize(
    "url",
    [
        "", "localhost:8000", "ftp://a.b", "file:///etc/passwd", "http://", "http:///v1", "http://a b/v1", "http://a\n.b",
        "http://a.b:99999", "http://a.b:x", "http://user:pass@a.b", "http://user@a.b", "http://a.b/v1?key=1", "http://a.b#x",
        "http://a.b/v1/chat/completions", "http://a.b/v1/models/", "http://ä.b", "http://" + "a" * 3_000, "http://[::1", "javascript:alert(1)",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        RemoteConfig(url=url)
    assert "pass@" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://localhost:1", True), ("http://LOCALHOST", True), ("http://a.localhost", True), ("http://127.1.2.3", True),
        ("http://[::1]:1", True), ("http://localhost.evil.com", False), ("http://127.0.0.1.evil.com", False),
        ("http://10.0.0.1", False), ("http://0.0.0.0", False),
    ],
)  # fmt: skip
def test_a_key_goes_unencrypted_to_this_machine_only(url: str, is_here: bool) -> None:
    config = RemoteConfig(url=url, api_key_env="K")
    assert config.is_on_this_machine is is_here
    if is_here:
        assert config.key({"K": "abc"}) == "abc"
    else:
        with pytest.raises(InvalidOption, match="unencrypted"):
            config.key({"K": "abc"})
        encrypted = RemoteConfig(url=url.replace("http", "https"), api_key_env="K")
        assert encrypted.key({"K": "abc"}) == "abc"


@pytest.mark.parametrize("key", ["", "  ", "two words", "tab\tinside", "line\nbreak", "ключ", "x" * 10_000])
def test_what_can_be_no_key_is_not_repeated(key: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        RemoteConfig(url="https://a.b", api_key_env="K").key({"K": key})
    assert not key.strip() or key not in str(caught.value)


@pytest.mark.parametrize("name", ["sk-abc", "a b", "1A", "$KEY", "A=B"])
def test_a_key_in_place_of_its_variables_name_is_not_repeated(name: str) -> None:
    with pytest.raises(InvalidOption, match="not the key itself") as caught:
        RemoteConfig(url="https://a.b", api_key_env=name)
    assert name not in str(caught.value)


def test_without_a_name_no_key_is_sent() -> None:
    assert RemoteConfig(url="http://a.b").key({"OPENAI_API_KEY": "sk"}) is None


@pytest.mark.parametrize("missing", ["openai", "prometheus_client"])
def test_a_missing_extra_is_told_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == missing or name.startswith("nanochat.backend.remote."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(NanochatError, match=r"pip install -e '\.\[connect\]'"):
        open_backend(RemoteConfig(url="http://localhost:1"))
