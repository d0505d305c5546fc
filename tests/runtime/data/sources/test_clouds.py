"""S3 and GCS: s3fs and gcsfs against emulators in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from batchwright.core.errors import RunError
from batchwright.runtime import Access, JsonLines, Parquet, TarShards, TokenFile
from tests.needs import needs
from tests.runtime.data.sources.test_faults import FILES, ROWS, TARS, TOKENS

# They choose a free port and print it; they end when their input ends, also if this process is killed.
S3 = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""
GCS = """
import sys
from gcp_storage_emulator.server import create_server
server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
server.start()
print(server._api._httpd.server_port, flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(scope="module", params=["s3", "gs"])
def cloud(request):
    """The protocol and fsspec's options of a bucket with all files."""
    for package in {"s3": ("moto", "s3fs"), "gs": ("gcp_storage_emulator", "gcsfs")}[request.param]:
        needs(package)
    code = {"s3": S3, "gs": GCS}[request.param]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as emulator:
        url = f"http://127.0.0.1:{int(next(line for line in emulator.stdout if line.strip().isdigit()))}"
        options = {
            "s3": {"key": "key", "secret": "secret", "endpoint_url": url},
            "gs": {"token": "anon", "project": "project", "endpoint_url": url},
        }[request.param]
        import fsspec

        system = fsspec.filesystem(request.param, **options)
        if request.param == "s3":
            system.mkdir("bucket")
        for name, body in FILES.items():
            system.pipe(f"bucket/{name}", body)
        yield f"{request.param}://bucket", options
        emulator.stdin.close()
        emulator.wait(30)


def test_every_format_in_a_bucket(cloud, tmp_path):
    bucket, options = cloud
    access = Access(tries=2, timeout=20, merge_gap=50, storage_options=options)
    order = np.random.default_rng(1).permutation(60).tolist()
    for source, rows in (
        (JsonLines(f"{bucket}/a.jsonl", index_folder=tmp_path, access=access), ROWS),
        (Parquet([f"{bucket}/a.parquet"] * 2, columns=["i"], access=access), [{"i": i} for i in range(200)] * 2),
        (TarShards(f"{bucket}/a.tar", index_folder=tmp_path, access=access), TARS),
        (TokenFile(f"{bucket}/m", access=access), TOKENS.reshape(200, 15)),
        (TokenFile(f"{bucket}/a.npy", sequence_length=15, access=access), TOKENS.reshape(200, 15)),
    ):
        assert len(source) == len(rows)
        read = source.__getitems__(order)
        assert all(np.array_equal(a, rows[i]) for a, i in zip(read, order, strict=True))
        assert source.reads.rows == 60 and source.reads.retries == 0
    again = JsonLines(f"{bucket}/a.jsonl", index_folder=tmp_path, access=access)
    assert len(again) == 200 and again.reads.bytes == 0  # its etag is known


def test_a_missing_object_is_named_at_once(cloud):
    bucket, options = cloud
    source = JsonLines(f"{bucket}/none.jsonl", access=Access(storage_options=options))
    with pytest.raises(RunError, match=r"bucket/none\.jsonl.*FileNotFoundError.*not tried again"):
        len(source)
    assert source.reads.retries == 0 and os.path.basename(source.files[0]) == "none.jsonl"
