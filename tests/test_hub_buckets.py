import time

import pytest
import requests
from huggingface_hub import HfApi
from huggingface_hub.errors import BadRequestError, BucketNotFoundError, HfHubHTTPError

from emulator.serve import Emulator
from jobs.bucket import Bucket


@pytest.fixture(scope="module")
def emulator():
    with Emulator() as emulator:
        yield emulator


@pytest.fixture
def api(emulator):
    return HfApi(endpoint=emulator.endpoint, token=emulator.token)


def test_files_are_added_listed_and_deleted(api):
    api.create_bucket("local/files", private=True)
    api.create_bucket("local/files", exist_ok=True)
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_bucket("local/files")
    api.batch_bucket_files("local/files", add=[(b"one", "a/1"), (b"two", "b/2"), (b"one", "ab"), (b"", "b/.keep")])
    info = api.bucket_info("local/files")
    assert (info.private, info.size, info.total_files) == (True, 9, 4)
    everything = list(api.list_bucket_tree("local/files", recursive=True))
    assert [file.path for file in everything] == ["a/1", "ab", "b/.keep", "b/2"]
    assert [(each.type, each.path) for each in api.list_bucket_tree("local/files")] == [
        ("directory", "a"),
        ("file", "ab"),
        ("directory", "b"),
    ]
    assert everything[0].xet_hash == everything[1].xet_hash != everything[3].xet_hash  # a/1 and ab are the same
    assert [(file.path, file.size) for file in api.list_bucket_tree("local/files", prefix="a")] == [("a/1", 3)]
    assert [file.path for file in api.get_bucket_paths_info("local/files", ["b/2", "c"])] == ["b/2"]
    api.batch_bucket_files("local/files", delete=["a/1"])
    assert api.bucket_info("local/files").total_files == 3


def test_what_s3_clients_wrote_is_listed(emulator, api):
    Bucket(emulator.bucket).put("runs/r/spec.json", b"{}")
    (file,) = api.list_bucket_tree("local/asyncgrpo", prefix="runs/r")
    assert (file.path, file.size) == ("runs/r/spec.json", 2)
    assert abs(time.time() - file.uploaded_at.timestamp()) < 60
    assert api.bucket_info("local/asyncgrpo").total_files == 1


def test_buckets_are_listed_and_deleted(api):
    api.create_bucket("local/one-of-many")
    api.batch_bucket_files("local/one-of-many", add=[(b"one", "a/1")])
    assert {"local/asyncgrpo", "local/one-of-many"} <= {bucket.id for bucket in api.list_buckets()}
    assert [bucket.id for bucket in api.list_buckets("local", search="of-many")] == ["local/one-of-many"]
    assert list(api.list_buckets("somebody")) == []
    api.delete_bucket("local/one-of-many")
    with pytest.raises(BucketNotFoundError):
        api.bucket_info("local/one-of-many")
    api.create_bucket("local/one-of-many")
    assert list(api.list_bucket_tree("local/one-of-many")) == []


def test_content_that_was_never_uploaded_is_a_failure(emulator, api):
    api.create_bucket("local/empty")
    answer = requests.post(
        f"{emulator.endpoint}/api/buckets/local/empty/batch",
        data=f'{{"type": "addFile", "path": "x", "xetHash": "{"1" * 64}", "mtime": 0}}\n',
        headers={"Authorization": f"Bearer {emulator.token}"},
        timeout=30,
    )
    assert answer.status_code == 422
    assert answer.json()["failed"][0]["path"] == "x"
    assert api.bucket_info("local/empty").total_files == 0


def test_a_name_that_s3_does_not_take(api):
    with pytest.raises(BadRequestError, match="InvalidBucketName"):
        api.create_bucket("local/f")


def test_unknown_bucket(api):
    with pytest.raises(BucketNotFoundError):
        api.bucket_info("local/nothing")
