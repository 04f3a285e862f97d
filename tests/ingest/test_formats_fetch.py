"""Content by reference: only from where it is allowed, no more than is allowed, and never from inside our network."""

import ipaddress
import socket
import threading

import pytest

from ingest.formats import EventReader
from ingest.formats.fetch import Fetcher
from ingest.formats.fetch_http import is_public
from schemas.errors import EventError, FetchError, SettingsError
from schemas.settings import FetchSettings, load_settings
from tests.ingest.formats_world import WebServer, send, sha256

CONTENT = "Büro".encode()


@pytest.fixture
def web():
    server = WebServer()
    server.files["/docs/a.txt"] = CONTENT
    yield server
    server.close()


def fetcher(web, *, allow=None, private=("127.0.0.1",), **changes):
    return Fetcher(FetchSettings(allow=allow or (web.url,), private_hosts=private, **{"timeout_s": 5, **changes}))


def get(web, path="/docs/a.txt", content=CONTENT, **changes):
    uri = path if "://" in path else web.url + path
    return fetcher(web, **changes).fetch(uri, sha256(content))


def test_what_is_allowed_is_fetched(web):
    assert get(web) == CONTENT
    assert web.headers["Host"] == f"127.0.0.1:{web.port}"
    assert web.headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    "path",
    [
        "/docs2/a.txt",
        "/docs/../secret",
        "/docs/%2e%2e/secret",
        "/docs/..%2fsecret",
        "/docs/%5c..%5csecret",
        "/docs\\..\\secret",
        "/docs/a\n.txt",
        "/",
        "http://127.0.0.1/docs/a.txt",
        "http://127.0.0.1.evil.example/docs/a.txt",
        "https://127.0.0.1/docs/a.txt",
        "http://[::1",
        "http:///docs/a.txt",
        "http://127.0.0.1:99999/docs/a.txt",
        "file:///etc/passwd",
        "gopher://127.0.0.1/docs/a.txt",
        "//127.0.0.1/docs/a.txt",
        "",
    ],
)
def test_what_lies_elsewhere_is_not_asked_for(web, path):
    """Bug: a prefix of text instead of a place let `/docs/../secret` and `host.evil.example` through."""
    with pytest.raises(EventError, match=r"may not be fetched|cannot be fetched"):
        fetcher(web, allow=(web.url + "/docs",)).fetch(path if "://" in path else web.url + path, sha256(CONTENT))
    assert web.asked == []


def test_a_user_name_cannot_pretend_to_be_the_host(web):
    with pytest.raises(EventError, match="a user name or password in a URI is refused"):
        get(web, f"http://127.0.0.1:{web.port}@evil.example/docs/a.txt")


def test_a_name_that_resolves_to_a_private_address_is_refused(web):
    """Bug: an allowed name was pointed at 127.0.0.1, and the service read its own metrics."""
    with pytest.raises(EventError, match="which is no public address"):
        get(web, f"http://localhost:{web.port}/docs/a.txt", allow=(f"http://localhost:{web.port}",), private=())
    assert web.asked == []


def test_a_name_is_resolved_once_and_that_address_is_connected_to(web, monkeypatch):
    """DNS rebinding: the second answer would be another address than the one that was judged."""
    asked = []

    def resolve(host, port, *args, **more):
        asked.append(host)
        assert len(asked) == 1 or host == "127.0.0.1", "a name was looked up twice"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    uri = f"http://docs.example:{web.port}/docs/a.txt"
    got = get(web, uri, allow=(f"http://docs.example:{web.port}",), private=("docs.example",))
    assert got == CONTENT
    assert asked[0] == "docs.example"
    assert web.headers["Host"] == f"docs.example:{web.port}", "the server is asked by its name"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fd00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ],
)  # fmt: skip
def test_addresses_of_inside_are_known(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_outside_are_known(address):
    assert is_public(ipaddress.ip_address(address))


def test_a_redirect_within_the_host_is_followed_and_one_to_elsewhere_is_not(web):
    web.files["/moved"] = lambda handler: send(handler, 302, headers={"Location": "/docs/a.txt"})
    web.files["/away"] = lambda handler: send(handler, 302, headers={"Location": "http://169.254.169.254/latest"})
    web.files["/port"] = lambda handler: send(handler, 307, headers={"Location": "http://127.0.0.1:1/docs/a.txt"})
    web.files["/loop"] = lambda handler: send(handler, 301, headers={"Location": "/loop"})
    assert get(web, "/moved") == CONTENT
    with pytest.raises(EventError, match="may not be fetched"):
        get(web, "/away")
    both = (web.url, "http://127.0.0.1:1")
    with pytest.raises(EventError, match="redirects to another host"):
        get(web, "/port", allow=both)
    with pytest.raises(EventError, match="redirects more than 3 times"):
        get(web, "/loop")


def test_a_redirect_out_of_the_folder_is_not_followed(web):
    web.files["/docs/out"] = lambda handler: send(handler, 302, headers={"Location": "/secret"})
    with pytest.raises(EventError, match="may not be fetched"):
        get(web, "/docs/out", allow=(web.url + "/docs/",))


def test_too_much_is_refused_whether_or_not_the_server_says_how_much(web):
    def endless(handler):
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b"x" * 65536)

    web.files["/big"] = b"x" * 2000
    web.files["/endless"] = endless
    for path in ("/big", "/endless"):
        with pytest.raises(EventError, match=r"larger than events\.fetch\.max_bytes, 1,000"):
            get(web, path, max_bytes=1000)


def test_a_compressed_answer_is_refused(web):
    """Bug: a small answer that unpacks to gigabytes passed the limit."""
    web.files["/zip"] = lambda handler: send(handler, 200, b"x", {"Content-Encoding": "gzip"})
    with pytest.raises(EventError, match="answers compressed"):
        get(web, "/zip")


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_a_server_that_fails_may_be_asked_again(web, status):
    web.files["/fails"] = lambda handler: send(handler, status)
    with pytest.raises(FetchError, match=f"the server answers {status}"):
        get(web, "/fails")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 204, 206])
def test_what_a_server_does_not_give_is_a_dead_letter(web, status):
    web.files["/no"] = lambda handler: send(handler, status)
    with pytest.raises(EventError, match=f"the server answers {status}"):
        get(web, "/no")


def test_a_server_that_is_away_or_too_slow_may_be_asked_again(web):
    released = threading.Event()

    def slow(handler):
        handler.send_response(200)
        handler.end_headers()
        released.wait(10)

    web.files["/slow"] = slow
    with pytest.raises(FetchError, match="cannot be fetched"):
        get(web, "/slow", timeout_s=0.2)
    released.set()
    url = web.url
    web.close()
    with pytest.raises(FetchError, match="cannot be fetched"):
        Fetcher(FetchSettings(allow=(url,), private_hosts=("127.0.0.1",))).fetch(url + "/x", "0" * 64)


def test_a_drip_of_bytes_has_the_same_time_as_one_piece(web):
    """Bug: a time-out for each read lets a server hold the pipeline for ever."""
    stop = threading.Event()

    def drip(handler):
        handler.send_response(200)
        handler.end_headers()
        while not stop.wait(0.02):
            handler.wfile.write(b"x")
            handler.wfile.flush()

    web.files["/drip"] = drip
    with pytest.raises(FetchError, match=r"took longer than events\.fetch\.timeout_s"):
        get(web, "/drip", timeout_s=0.3)
    stop.set()


def test_a_host_that_does_not_resolve_may_be_asked_again(web, monkeypatch):
    def resolve(*_, **__):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(FetchError, match=r"docs\.example cannot be resolved"):
        get(web, "https://docs.example/a", allow=("https://docs.example",))


def test_the_proxy_of_the_environment_is_not_used(web, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert get(web) == CONTENT


def test_files_are_read_below_the_folders_that_are_listed(tmp_path):
    folder, secret = tmp_path / "docs", tmp_path / "secret"
    folder.mkdir()
    (folder / "ä b.txt").write_bytes(CONTENT)
    secret.write_bytes(CONTENT)
    (folder / "link").symlink_to(secret)
    source = Fetcher(FetchSettings(allow=(folder.as_uri(),), max_bytes=10))
    assert source.fetch((folder / "ä b.txt").as_uri(), sha256(CONTENT)) == CONTENT
    with pytest.raises(EventError, match=r"is a link to a place that events\.fetch\.allow does not list"):
        source.fetch((folder / "link").as_uri(), sha256(CONTENT))
    with pytest.raises(EventError, match="may not be fetched"):
        source.fetch(secret.as_uri(), sha256(CONTENT))
    with pytest.raises(EventError, match=r"is no regular file|does not exist"):
        source.fetch(folder.as_uri(), sha256(CONTENT))
    (folder / "long").write_bytes(b"x" * 11)
    with pytest.raises(EventError, match="larger than"):
        source.fetch((folder / "long").as_uri(), sha256(b"x" * 11))


def test_objects_are_read_with_the_options_of_their_bucket(web):
    web.files["/corpus/b/ä b.pdf"] = web.files["/corpus/b/%C3%A4%20b.pdf"] = CONTENT
    bucket = {"endpoint": web.url, "skip_signature": "true", "region": "x", "virtual_hosted_style_request": "false"}
    options = {"s3://corpus": bucket}
    source = fetcher(web, allow=("s3://corpus/b/",), options=options)
    assert source.fetch("s3://corpus/b/%C3%A4%20b.pdf", sha256(CONTENT)) == CONTENT
    with pytest.raises(EventError, match="does not exist"):
        source.fetch("s3://corpus/b/missing", sha256(CONTENT))
    with pytest.raises(EventError, match="may not be fetched"):
        source.fetch("s3://other/b/missing", sha256(CONTENT))
    with pytest.raises(EventError, match="larger than"):
        fetcher(web, allow=("s3://corpus",), options=options, max_bytes=2).fetch(
            "s3://corpus/b/%C3%A4%20b.pdf", "0" * 64
        )


def test_a_bucket_whose_server_is_away_may_be_asked_again(web):
    options = {"s3://corpus": {"endpoint": "http://127.0.0.1:1", "skip_signature": "true", "region": "x"}}
    with pytest.raises(FetchError, match="s3://corpus/a cannot be read"):
        fetcher(web, allow=("s3://corpus",), options=options, timeout_s=1).fetch("s3://corpus/a", "0" * 64)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("docs.example", "the scheme must be one of"),
        ("https://*.example", "without wildcards"),
        ("https://docs.example/?a=b", "without wildcards, query or fragment"),
        ("https://a:b@docs.example", "a user name or password"),
        ("https:///docs", "it names no host"),
        ("file://docs/a", "three slashes"),
        ("https://docs.example/../a", "dot segment"),
    ],
)
def test_a_place_that_cannot_be_meant_stops_the_process(place, says):
    with pytest.raises(SettingsError, match=r"events\.fetch\.allow") as refused:
        load_settings({"events": {"fetch": {"allow": [place]}}})
    assert says in str(refused.value)


def test_the_credentials_of_buckets_are_not_printed():
    settings = load_settings({"events": {"fetch": {"options": {"s3://b": {"secret_access_key": "s3cr3t"}}},
                                         "registry": {"token": "s3cr3t", "password": "s3cr3t"}}})  # fmt: skip
    assert "s3cr3t" not in f"{settings.redacted()} {settings.events}"


def test_a_reader_can_be_closed_and_used_again(formats):
    from tests.ingest.formats_world import golden, message

    reader = EventReader(formats.settings())
    for _ in range(2):
        assert reader.read(message(golden("avro"))).version == 7
        assert reader.read(message(formats.put("/x", b"x"))).content == "x"
        reader.close()
