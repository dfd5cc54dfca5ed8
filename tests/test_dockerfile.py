from pathlib import Path

from jobs.recipe import JobSettings

DOCKERFILE = Path(__file__).resolve().parent.parent / "jobs" / "Dockerfile"


def test_the_image_has_what_a_job_would_install() -> None:
    lines = DOCKERFILE.read_text().replace("\\\n", " ").splitlines()
    assert f"FROM {JobSettings().image}" in lines
    install = next(line for line in lines if line.startswith("RUN python3 -m pip install"))
    packages = [word for word in install.split() if "==" in word]
    assert packages == JobSettings().trainer_packages
