"""The site of a run: the Hub (or its stand-in), the bucket, and what each Job gets in its environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from huggingface_hub import HfApi, get_token

from jobs import hub, reward_server
from jobs.bucket import BucketSettings
from jobs.errors import ConfigError

HUB = "https://huggingface.co"
POLL_S, LOCAL_POLL_S = 10.0, 0.5
"""The pace of following. The Hub allows 1,000 to 2,500 calls per 5 minutes; the stand-in has quota to spare."""
WHOAMI_PATIENCE_S = 20.0
"""How long the first call to the Hub is tried again: somebody waits at a terminal."""


@dataclass(frozen=True)
class Account:
    """Somebody at the Hub, or at its stand-in: all that is needed to find Jobs and to end them."""

    endpoint: str
    token: str = field(repr=False)
    namespace: str

    @classmethod
    def named(cls, environ: Mapping[str, str], namespace: str | None = None) -> "Account":
        """Whom the environment names (HF_ENDPOINT, HF_TOKEN), as `hf` does; `namespace` is their own if left out.

        Raises:
            ConfigError: no token, or one that the Hub refuses.
        """
        account = cls(environ.get("HF_ENDPOINT") or HUB, _token(environ), namespace or "")
        return account if namespace else replace(account, namespace=str(account.whoami()["name"]))

    @property
    def local(self) -> bool:
        """Whether the Jobs run on this machine, at the stand-in for the Hub."""
        return hub.is_local(self.endpoint)

    def hub(self) -> HfApi:
        """A client of the Hub."""
        return hub.connect(self.endpoint, self.token)

    def whoami(self) -> dict[str, Any]:
        """Whom the token belongs to; raises ConfigError if the Hub refuses it or does not answer."""
        try:
            found: dict[str, Any] = hub.patiently(self.hub().whoami, WHOAMI_PATIENCE_S)
            return found
        except hub.UNSURE as error:
            raise ConfigError(f"the Hub at {self.endpoint} refuses HF_TOKEN, or does not answer: {error}") from error


@dataclass(frozen=True)
class Site(Account):
    """Where the Jobs of a run go. `poll_s` is the pace of following; `secrets` are the user's own for the Jobs."""

    bucket: BucketSettings
    environment: Mapping[str, str] = field(default_factory=dict)
    poll_s: float = POLL_S
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def from_env(cls, environ: Mapping[str, str], namespace: str | None = None, bucket: str | None = None) -> "Site":
        """The account and the bucket that the environment names (AWS_*, as S3 clients read them).

        `bucket` is s3://bucket[/prefix], or ASYNCGRPO_BUCKET if left out.

        Raises:
            ConfigError: no such account, or an incomplete bucket.
        """
        _token(environ)  # before the Hub is asked, the user hears of all that is missing here
        if bucket is None and not environ.get("ASYNCGRPO_BUCKET"):
            raise ConfigError("no bucket: name one with --bucket s3://bucket[/prefix], or in ASYNCGRPO_BUCKET.")
        settings = BucketSettings.from_env(environ if bucket is None else {**environ, "ASYNCGRPO_BUCKET": bucket})
        whose = Account.named(environ, namespace)
        own = reward_server.secrets(environ)
        poll_s = LOCAL_POLL_S if whose.local else POLL_S
        return cls(whose.endpoint, whose.token, whose.namespace, settings, poll_s=poll_s, secrets=own)


def _token(environ: Mapping[str, str]) -> str:
    if token := environ.get("HF_TOKEN") or get_token():
        return token
    raise ConfigError("HF_TOKEN is not set, and `hf auth login` was not done: Jobs need a token that may write.")
