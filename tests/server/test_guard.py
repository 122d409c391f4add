"""Who may ask: with the key, or from this machine; never a web page."""

from __future__ import annotations

import httpx2
import openai
import pytest

from nanochat.addresses import is_loopback
from nanochat.errors import NanochatError, WrongUsage
from nanochat.server.run import bind, check_address, listen
from tests.server.conftest import MakeServer, Running


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:80", "127.0.0.1:8000", "127.8.8.8", "[::1]:80", "LOCALHOST."]
)
def test_names_of_this_machine(api: Running, host: str) -> None:
    assert httpx2.get(f"{api.url}/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"host": "localhost.evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost@evil.example"},
        {"host": "192.168.0.1"},
        {"host": ""},
        {"host": "["},
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_web_pages(api: Running, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/metrics", "/health"):
        reply = httpx2.get(api.url + path, headers=headers)
        assert reply.status_code == 403
        assert reply.json()["error"]["type"] == "permission_error"
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_a_browsers_question_before_a_request_is_refused(api: Running) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert httpx2.options(f"{api.url}/v1/chat/completions", headers=asked).status_code == 403


def test_the_key(make_server: MakeServer) -> None:
    api = make_server(api_key="schlüssel", any_host=True)
    good = {"authorization": "Bearer schlüssel".encode()}
    assert httpx2.get(f"{api.url}/v1/models", headers=good | {"host": b"my.example"}).status_code == 200
    assert httpx2.get(f"{api.url}/metrics", headers=good).status_code == 200
    assert httpx2.get(f"{api.url}/health").status_code == 200
    bad = [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer schlussel"},
        {"authorization": "schlüssel".encode()},
    ]
    for headers in bad:
        for path in ("/v1/models", "/metrics", "/nothing"):
            assert httpx2.get(api.url + path, headers=headers).status_code == 401  # type: ignore[arg-type]
    with pytest.raises(openai.AuthenticationError) as caught:
        api.client(api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"


def test_blanks_around_the_key_count_on_neither_side(make_server: MakeServer) -> None:
    for key in ("abc \t\n", " voilà "):  # à ends in a byte that is a blank in Latin-1
        api = make_server(api_key=key, any_host=True)
        for given in (key.strip(), f"  {key.strip()}"):
            headers = {"authorization": f"Bearer {given}".encode()}
            assert httpx2.get(f"{api.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "port", "key", "sentence"),
    [
        ("0.0.0.0", 8000, None, "give it an --api-key"),
        ("::", 8000, None, "give it an --api-key"),
        ("my.example", 8000, None, "give it an --api-key"),
        ("127.0.0.1", 8000, "", "The API key is empty"),
        ("127.0.0.1", 8000, " \n", "The API key is empty"),
        (" ", 8000, None, "--host is empty"),
        ("127.0.0.1", 65_536, None, "--port"),
        ("127.0.0.1", -1, None, "--port"),
    ],
)
def test_an_address_that_wont_do(host: str, port: int, key: str | None, sentence: str) -> None:
    with pytest.raises(WrongUsage, match=sentence):
        check_address(host, port, key)
    check_address("0.0.0.0", 0, "key")
    check_address("localhost", 0, None)


def test_a_port_that_is_taken() -> None:
    (taken,) = bind("127.0.0.1", 0)
    taken.listen()
    with taken, pytest.raises(NanochatError, match="Address already in use; choose another --port"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_a_port_that_is_taken_while_the_model_loads() -> None:
    """Until one of them listens, two may hold it."""
    (first,) = bind("127.0.0.1", 0)
    (second,) = bind("127.0.0.1", first.getsockname()[1])
    with first, second:
        listen([first])
        with pytest.raises(NanochatError, match="Address already in use; choose another --port"):
            listen([second])


def test_localhost_is_one_port_in_all_its_addresses() -> None:
    sockets = bind("localhost", 0)
    assert len({made.getsockname()[1] for made in sockets}) == 1
    assert all(is_loopback(made.getsockname()[0]) for made in sockets)
    for made in sockets:
        made.close()


@pytest.mark.parametrize("host", ["nosuch.invalid", "a" * 70 + ".b", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_blamed_and_not_the_port(host: str) -> None:
    with pytest.raises(NanochatError, match=r"is no address of this machine .*another --host"):
        bind(host, 0)
