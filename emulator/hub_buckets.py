"""The Hub's storage buckets over HTTP, as far as `hf jobs run -v ./directory:/path` and `HfApi` need them for uploads.

Files come by way of Xet, whose client can write its content-addressed store to a local directory. Each write token
names such a directory; `/batch` takes the files out of it and puts them into the S3 bucket of the same name, where
volumes and S3 clients find them, as what those write is listed here. Downloads through Xet are not offered: read
buckets through S3.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from emulator.jobs_state import BadRequest, now, timestamp
from emulator.volumes import in_s3
from jobs.bucket import Bucket, BucketSettings, Entry
from jobs.errors import BucketError

TOKEN_S = 3600.0
"""How long a write token is good for; the client asks for another in time."""
EXTRACT_S = 300.0

# In a process of its own: the library starts a pool of threads that would stay, and locks the store it opens.
_EXTRACT = """
import json, os, sys
from hf_xet import XetFileInfo, XetSession
store, wanted = sys.argv[1], json.load(sys.stdin)
with XetSession().new_file_download_group(endpoint="local://" + store) as group:
    for xet_hash, path in wanted.items():
        group.start_download_file(XetFileInfo(xet_hash), path)
for xet_hash, path in wanted.items():
    if not os.path.getsize(path) and xet_hash.strip("0"):  # what a store does not have, it writes as an empty file
        os.unlink(path)
"""


class UnknownBucket(KeyError):
    """No bucket has this name (404)."""


NO_HASH = "0" * 64
"""Xet hash of a file that did not come by way of Xet."""


@dataclass
class HubBucket:
    """What the Hub knows about a bucket that S3 does not: when it was made, and of files that came by way of Xet, by
    etag, their hash and time."""

    id: str
    private: bool
    created: str
    uploads: dict[str, tuple[str, str]] = field(default_factory=dict)

    def to_json(self, files: Collection[Entry]) -> dict[str, Any]:
        """In the words of `huggingface_hub.BucketInfo`."""
        return {
            "id": self.id,
            "private": self.private,
            "createdAt": self.created,
            "size": sum(file.size for file in files),
            "totalFiles": len(files),
        }

    def file(self, path: str, entry: Entry) -> dict[str, Any]:
        """In the words of `huggingface_hub.BucketFile`."""
        uploaded = timestamp(entry.modified)
        xet_hash, mtime = self.uploads.get(entry.etag, (NO_HASH, uploaded))
        return {
            "type": "file",
            "path": path,
            "size": entry.size,
            "xetHash": xet_hash,
            "mtime": mtime,
            "uploadedAt": uploaded,
        }


class HubBuckets:
    """The routes below /api/buckets. `directory` holds the Xet stores. The emulation's bucket is the user's first."""

    def __init__(self, settings: BucketSettings, directory: Path, endpoint: str, user: str) -> None:
        self._settings = settings
        self._directory = directory
        self._endpoint = endpoint
        self._buckets: dict[str, HubBucket] = {}
        self._user = user
        first = f"{user}/{settings.url.removeprefix('s3://').partition('/')[0]}"
        self._buckets[first] = HubBucket(first, True, str(timestamp(now())))
        self._stores: list[Path] = []

    @property
    def routes(self) -> list[Route]:
        """For the Hub's application."""
        bucket = "/api/buckets/{namespace}/{name}"
        return [
            Route(bucket, self.create, methods=["POST"]),
            Route(bucket, self.info, methods=["GET"]),
            Route(bucket, self.delete, methods=["DELETE"]),
            Route("/api/buckets/{namespace}", self.list),
            Route(f"{bucket}/xet-write-token", self.write_token),
            Route(f"{bucket}/batch", self.batch, methods=["POST"]),
            Route(f"{bucket}/paths-info", self.paths_info, methods=["POST"]),
            Route(f"{bucket}/tree", self.tree),
            Route(f"{bucket}/tree/{{prefix:path}}", self.tree),
        ]

    def _bucket(self, request: Request) -> HubBucket:
        bucket = self._buckets.get("{namespace}/{name}".format_map(request.path_params))
        if bucket is None:
            raise UnknownBucket
        return bucket

    async def create(self, request: Request) -> Response:
        """Make a bucket, here and in S3; 409 if there is one."""
        bucket_id = "{namespace}/{name}".format_map(request.path_params)
        url = f"{self._endpoint}/buckets/{bucket_id}"
        if bucket_id in self._buckets:
            return JSONResponse({"error": "You already created this bucket", "url": url}, 409)
        await asyncio.to_thread(self._make, bucket_id)
        body = await request.json()
        self._buckets[bucket_id] = HubBucket(bucket_id, bool(body.get("private")), str(timestamp(now())))
        return JSONResponse({"url": url})

    def _make(self, bucket_id: str) -> None:
        try:
            self._open(bucket_id).create()
        except (ValueError, BucketError) as error:  # S3 has rules for names of its own
            raise BadRequest(str(error)) from error

    def _open(self, bucket_id: str) -> Bucket:
        return Bucket(in_s3(self._settings, bucket_id))

    async def info(self, request: Request) -> Response:
        """One bucket."""
        bucket = self._bucket(request)
        return JSONResponse(bucket.to_json((await self._entries(bucket)).values()))

    async def _entries(self, bucket: HubBucket, prefix: str = "") -> dict[str, Entry]:
        return await asyncio.to_thread(lambda: self._open(bucket.id).entries(prefix))

    async def list(self, request: Request) -> Response:
        """All buckets of a namespace whose names hold the text that was searched for."""
        namespace, text = request.path_params["namespace"], request.query_params.get("search", "")
        start = f"{self._user if namespace == 'me' else namespace}/"
        found = [each for name, each in self._buckets.items() if name.startswith(start) and text in name]
        return JSONResponse([each.to_json((await self._entries(each)).values()) for each in found])

    async def delete(self, request: Request) -> Response:
        """Forget a bucket, and delete all that is in it."""
        bucket = self._bucket(request)
        files = await self._entries(bucket)
        await asyncio.to_thread(lambda: self._open(bucket.id).delete(files))
        del self._buckets[bucket.id]
        return Response(status_code=204)

    async def write_token(self, request: Request) -> Response:
        """A directory of its own for what this client will upload."""
        self._bucket(request)
        self._directory.mkdir(exist_ok=True)
        store = Path(tempfile.mkdtemp(dir=self._directory))
        self._stores.append(store)
        return JSONResponse(
            {"casUrl": f"local://{store}", "accessToken": store.name, "exp": int(time.time() + TOKEN_S)}
        )

    async def batch(self, request: Request) -> Response:
        """Add and delete files, each line one operation."""
        bucket = self._bucket(request)
        operations = [json.loads(line) for line in (await request.body()).splitlines() if line]
        add = {op["path"]: op for op in operations if op["type"] == "addFile"}
        delete = [op["path"] for op in operations if op["type"] == "deleteFile"]
        if len(add) + len(delete) != len(operations):
            raise BadRequest("only addFile and deleteFile are supported here")
        etags = await asyncio.to_thread(self._store, bucket.id, add, delete)
        missing = [path for path in add if path not in etags]
        for path, etag in etags.items():
            mtime = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(add[path]["mtime"] / 1000))
            bucket.uploads[etag] = (add[path]["xetHash"], mtime)
        failed = [{"path": path, "error": "its content was not uploaded"} for path in missing]
        answer = {"success": not failed, "processed": len(operations), "failed": failed}
        return JSONResponse(answer, 422 if failed and not etags else 200)

    def _store(self, bucket_id: str, add: dict[str, dict[str, Any]], delete: Sequence[str]) -> dict[str, str]:
        """Put the files into S3; returns path -> etag of those whose content was found."""
        etags: dict[str, str] = {}
        bucket = self._open(bucket_id)
        with tempfile.TemporaryDirectory(dir=self._directory.parent) as scratch:
            wanted = {op["xetHash"]: str(Path(scratch, op["xetHash"])) for op in add.values()}
            for index, store in enumerate(reversed(self._stores)):
                if wanted_here := {h: path for h, path in wanted.items() if not Path(path).exists()}:
                    self._extract(store, Path(scratch, f"store-{index}"), wanted_here)
            for path, op in add.items():
                content = Path(wanted[op["xetHash"]])
                if content.exists():
                    etags[path] = bucket.put_file(path, content)
        bucket.delete(delete)
        return etags

    def _extract(self, store: Path, copy: Path, wanted: dict[str, str]) -> None:
        """Take files out of a store, of which the uploading client may still hold the lock: hence the copy."""
        shutil.copytree(store, copy)
        subprocess.run(
            [sys.executable, "-c", _EXTRACT, str(copy)],
            input=json.dumps(wanted),
            text=True,
            stderr=subprocess.DEVNULL,
            timeout=EXTRACT_S,
            check=False,  # files that are not in this store
        )

    async def paths_info(self, request: Request) -> Response:
        """Those of the asked files that exist."""
        bucket, paths = self._bucket(request), (await request.json())["paths"]
        files = await self._entries(bucket)
        return JSONResponse([bucket.file(path, files[path]) for path in paths if path in files])

    async def tree(self, request: Request) -> Response:
        """Files and folders below a folder, or the file of that name; all files if `recursive`."""
        bucket, prefix = self._bucket(request), request.path_params.get("prefix", "").strip("/")
        found: dict[str, dict[str, Any]] = {}
        for path, entry in sorted((await self._entries(bucket, prefix)).items()):
            if prefix and not f"{path}/".startswith(f"{prefix}/"):
                continue
            below, folder, _ = path[len(prefix) :].lstrip("/").partition("/")
            if folder and request.query_params.get("recursive") not in ("true", "True", "1"):
                name = f"{prefix}/{below}".lstrip("/")
                found[name] = {"type": "directory", "path": name, "uploadedAt": timestamp(entry.modified)}
            else:
                found[path] = bucket.file(path, entry)
        return JSONResponse(list(found.values()))
