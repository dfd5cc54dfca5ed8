"""Names on the wire between the roles."""

from collections.abc import Mapping

KEY_HEADER = "x-asyncgrpo-key"
"""Header with the run's key: it opens a replica. The bearer token only opens the gateway of an exposed port."""

GROUP_PREFIX = "HF_NETWORK_GROUP_PREFIX"
"""The variable by which a Job finds the members of its network group: an alias is appended to its value."""


def group_url(alias: str, port: int) -> str:
    """Where members of a network group find one that claims `alias`; they alone know the variable in it."""
    return f"http://${{{GROUP_PREFIX}}}{alias}:{port}"


def upstream_headers(environ: Mapping[str, str], gateway: bool = True) -> dict[str, str]:
    """Headers that open a replica and, where there is one, its `gateway`: from `ASYNCGRPO_KEY` and `HF_TOKEN`."""
    headers = {}
    if key := environ.get("ASYNCGRPO_KEY"):
        headers[KEY_HEADER] = key
    if gateway and (token := environ.get("HF_TOKEN")):
        headers["authorization"] = f"Bearer {token}"
    return headers
