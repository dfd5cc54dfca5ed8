from concurrent.futures import ThreadPoolExecutor

from jobs import attempts
from jobs.bucket import Bucket
from tests.conftest import MotoBucket


def test_each_start_of_a_trainer_gets_a_number_of_its_own(moto_bucket: MotoBucket) -> None:
    bucket = Bucket.from_env(moto_bucket.environ)
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: attempts.claim(bucket, "run"), range(8)))
    assert sorted(claimed) == list(range(1, 9))
    assert attempts.claim(bucket, "run") == 9
    assert attempts.claim(bucket, "other") == 1
