"""Publishing: from the directory that TRL saved to an immutable, signed version in the bucket, and back after a
restart.

Objects of a version, below `jobs.manifest.adapter_prefix`: the adapter's files, then `manifest.json` (conditional
PUT), and once it is unloaded or has failed, the mark `retired`. A bucket may be far, away, or show new objects seconds
late, so all of this is also noted in the output directory: a proxy that is started again on the same machine knows it
at once.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from jobs.bucket import Bucket
from jobs.errors import BucketError, ConfigError, NotFound
from jobs.manifest import FILES, Manifest, adapter_prefix, build, manifest_key
from jobs.names import WireName, parse_wire
from jobs.version import REMEMBERED_VERSIONS, VersionRefused, VersionState

log = logging.getLogger(__name__)

THREADS = 8
"""For calls of the bucket: both files of a publish, a few marks and the look-out for replicas, with room to spare."""
NOTES = ".published.jsonl"
"""In the output directory: signed manifests and marks in the order in which they came, each on a line of its own."""

T = TypeVar("T")


@dataclass(frozen=True)
class Published:
    """A version as it lies in the bucket. `publish_s` is None for one that an earlier process published."""

    manifest: Manifest
    state: VersionState = VersionState.LIVE
    words: str | None = None
    publish_s: float | None = None


class Publisher:
    """Writes and reads the versions of one attempt. Every call is tried again by the bucket for `bucket.retry_s`."""

    def __init__(self, bucket: Bucket, run: str, attempt: int, key: str, output_dir: Path | None) -> None:
        self.bucket, self.run, self.attempt, self.output_dir = bucket, run, attempt, output_dir
        self.versions: dict[str, Published] = {}
        self.count = self.bytes = 0  # published in this attempt
        self._key = key
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="bucket")
        self._marks: set[asyncio.Task[None]] = set()

    async def describe(self, version: int, path: str, base_model: str, max_rank: int | None) -> Manifest:
        """The manifest of the adapter in the directory `path`, not yet published.

        Raises:
            ConfigError: the path is none that may be read, or its adapter is none that vLLM can serve.
        """
        name = WireName(self.run, self.attempt, version)
        return await self.in_thread(lambda: build(self._allowed(path), name, base_model, max_rank))

    async def upload(self, manifest: Manifest, path: str) -> Published:
        """Makes the version durable: its files, then its manifest.

        Raises:
            BucketError: the bucket did not take it within its deadline; says why.
            VersionRefused: another adapter has that name.
        """
        started = time.monotonic()
        directory, prefix = self._allowed(path), adapter_prefix(manifest.run, manifest.attempt, manifest.version)
        await asyncio.gather(*(self._put_file(f"{prefix}/{name}", directory / name) for name in FILES))
        signed = replace(manifest, published_at=time.time()).sign(self._key)
        if not await self.in_thread(lambda: self.bucket.put_new(f"{prefix}/manifest.json", signed.to_json())):
            # An earlier process of this proxy got as far; it may have been killed before it could say so.
            found = await self.in_thread(lambda: self._read(manifest.version, self.bucket.retry_s))
            if found.digest != manifest.digest:
                raise VersionRefused(
                    f"{manifest.wire_name} is in the bucket with digest {found.digest[:12]} and cannot become "
                    f"{manifest.digest[:12]}: publish new weights under a new name."
                )
            signed = found
        published = self.versions[manifest.wire_name] = Published(signed, publish_s=time.monotonic() - started)
        self.count += 1
        self.bytes += manifest.size
        await self.in_thread(lambda: self._note(signed.to_json()))
        return published

    async def adopt(self, wire: str, key: str) -> Published:
        """A version that a proxy before this one published, by the key of its manifest.

        Raises:
            ConfigError: the key is not that of `wire`, or the manifest is forged.
            NotFound: it is not visible yet.
            BucketError: the bucket does not answer.
        """
        name = parse_wire(wire)
        if name is None or key != manifest_key(name.run, name.attempt, name.version):
            raise ConfigError(f"lora_path = 'manifest:{key}' is not where the manifest of {wire!r} lies.")
        manifest = await self.in_thread(lambda: self._verified(wire, self.bucket.get(key)))
        return self.versions.setdefault(wire, Published(manifest))

    async def recover(self) -> list[Published]:
        """What earlier processes of this proxy published in this attempt, oldest first: from the notes, or from the
        bucket if there are none.

        Raises:
            BucketError: the bucket does not answer.
        """
        versions = await self.in_thread(self._recover_from_notes)
        if versions is None:
            versions = await self._recover_from_bucket()
        self.versions |= {published.manifest.wire_name: published for published in versions}
        return versions

    def mark(self, wire: str, state: VersionState, words: str | None = None) -> None:
        """Notes, and in the background marks in the bucket, that a version is retired or failed: so a restart does not
        revive it."""
        body = json.dumps({"state": state, "words": words}).encode()
        self._later(wire, state, words, lambda key: self.bucket.put(key, body))

    def unmark(self, wire: str) -> None:
        """Takes the mark back: the version is published again."""
        self._later(wire, VersionState.LIVE, None, lambda key: self.bucket.delete([key]))

    async def marked(self) -> None:
        """Returns when every mark is in the bucket, so that at most one can be lost with this process."""
        while self._marks:
            await asyncio.wait(self._marks)

    async def close(self) -> None:
        """Waits for the marks and ends the threads."""
        await self.marked()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Runs a blocking call of the bucket outside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _put_file(self, key: str, path: Path) -> None:
        await self.in_thread(lambda: self.bucket.put_file(key, path))

    def _later(self, wire: str, state: VersionState, words: str | None, write: Callable[[str], object]) -> None:
        name = parse_wire(wire)
        if name is None or (name.run, name.attempt) != (self.run, self.attempt):
            return  # published by a proxy before this one, which keeps its own books
        self._note(json.dumps({"mark": wire, "state": state, "words": words}).encode())
        before = list(self._marks)
        key = f"{adapter_prefix(name.run, name.attempt, name.version)}/retired"

        async def do() -> None:
            await _over(before)
            try:
                await self.in_thread(lambda: write(key))
            except BucketError as error:
                log.warning("%s could not be marked in the bucket: %s", wire, error)

        task = asyncio.get_running_loop().create_task(do())
        self._marks.add(task)
        task.add_done_callback(self._marks.discard)

    async def _recover_from_bucket(self) -> list[Published]:
        prefix = f"runs/{self.run}/adapters/{self.attempt}/"
        keys = set(await self.in_thread(lambda: self.bucket.list(prefix)))
        numbers = [
            int(match[1]) for key in keys if (match := re.fullmatch(rf"{re.escape(prefix)}v(\d+)/manifest\.json", key))
        ]
        newest = sorted(numbers)[-REMEMBERED_VERSIONS:]
        found = await asyncio.gather(*(self._recover(n, f"{prefix}v{n}/retired" in keys) for n in newest))
        self.count = len(numbers)
        return [published for published in found if published]

    async def _recover(self, version: int, is_marked: bool) -> Published | None:
        try:
            manifest = await self.in_thread(lambda: self._read(version))
        except ConfigError as error:
            log.warning("a version in the bucket is passed over: %s", error)
            return None
        if not is_marked:
            return Published(manifest)
        key = f"{adapter_prefix(self.run, self.attempt, version)}/retired"
        try:
            mark = json.loads(await self.in_thread(lambda: self.bucket.get(key)))
            return Published(manifest, VersionState(mark["state"]), mark["words"])
        except (NotFound, ValueError, KeyError, TypeError):
            return Published(manifest, VersionState.RETIRED)

    def _note(self, line: bytes) -> None:
        if self.output_dir is not None:
            with (self.output_dir / NOTES).open("ab") as notes:
                notes.write(b"\n" + line)  # so that a line which was cut short spoils no other

    def _recover_from_notes(self) -> list[Published] | None:
        """What the notes say of this attempt; None if there are none. Of thousands of lines only the newest count."""
        if self.output_dir is None or not (notes := self.output_dir / NOTES).exists():
            return None
        lines: dict[int, bytes] = {}
        sizes: dict[int, int] = {}
        marks: dict[str, tuple[VersionState, str | None]] = {}
        for line in notes.read_bytes().split(b"\n")[1:]:
            try:
                entry = json.loads(line)
                if wire := entry.get("mark"):
                    marks[wire] = VersionState(entry["state"]), entry["words"]
                elif (entry["run"], entry["attempt"]) == (self.run, self.attempt):
                    lines[entry["version"]] = line
                    sizes[entry["version"]] = sum(file["size"] for file in entry["files"].values())
            except (ValueError, KeyError, TypeError) as error:
                log.warning("a note in %s is passed over: %r", notes, error)
        self.count, self.bytes = len(sizes), sum(sizes.values())
        found = []
        for version in sorted(lines)[-REMEMBERED_VERSIONS:]:
            wire = str(WireName(self.run, self.attempt, version))
            try:
                found.append(Published(self._verified(wire, lines[version]), *marks.get(wire, ())))
            except ConfigError as error:
                log.warning("a note in %s is passed over: %s", notes, error)
        return found

    def _read(self, version: int, within_s: float = 0.0) -> Manifest:
        name = WireName(self.run, self.attempt, version)
        key = manifest_key(name.run, name.attempt, name.version)
        return self._verified(str(name), self.bucket.get_shown(key, within_s))

    def _verified(self, wire: str, data: bytes) -> Manifest:
        manifest = Manifest.from_json(data)
        if manifest.wire_name != wire or not manifest.verify_signature(self._key):
            raise ConfigError(f"the manifest of {wire} is not signed with this run's key for that name.")
        return manifest

    def _allowed(self, path: str) -> Path:
        """The directory `path`, if it and the adapter's files in it really lie below the output directory."""
        if self.output_dir is None:
            raise ConfigError("output_dir is not set: this proxy publishes nothing. Set ASYNCGRPO_OUTPUT_DIR for it.")
        root, directory = self.output_dir.resolve(), Path(path).resolve()
        for found in (directory, *((directory / name).resolve() for name in FILES)):
            if not found.is_relative_to(root):
                raise ConfigError(
                    f"lora_path = {path!r} is not below the output directory {root}: only adapters that the trainer "
                    "saved there are published. Set ASYNCGRPO_OUTPUT_DIR to the trainer's output_dir."
                )
        return directory


async def _over(tasks: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
