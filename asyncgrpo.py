"""The command line of asyncgrpo: thin commands, each of which calls one module."""

import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from jobs import bundle

bundle.activate()

import click  # noqa: E402 (the bundled packages must be findable first)

from jobs.errors import AsyncgrpoError  # noqa: E402
from jobs.logs import outlive_readers  # noqa: E402


class Commands(click.Group):
    """A group whose commands show an error of ours as one message, with its exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command that was named."""
        try:
            return super().invoke(ctx)
        except AsyncgrpoError as error:
            click.echo(f"asyncgrpo: {error}", err=True)
            ctx.exit(error.exit_status)


def example(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Appends a runnable example to a command's help."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n\b\nExample:\n  {text}"
        return function

    return decorate


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(bundle.version(), prog_name="asyncgrpo")
def main() -> None:
    """Trains a LoRA adapter with TRL's AsyncGRPOTrainer on machines that share nothing but a bucket and HTTPS.

    \b
    Example:
      asyncgrpo emulate digit
    """
    outlive_readers()


TRANSPORT = click.option(
    "--transport",
    type=click.Choice(["s3", "mount"]),
    default="s3",
    show_default=True,
    help="How replicas read adapters: by S3, or from the Hub's bucket mounted as a directory, which lags.",
)


@main.command()
@example("asyncgrpo emulate digit --set trainer.max_steps=40 --replicas 3 --json")
@click.argument("recipe", required=False)
@click.option("--config", type=click.Path(dir_okay=False), help="TOML file whose fields replace the recipe's.")
@click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Replaces one field; may be given again."
)
@click.option("--replicas", type=int, help="Number of replica Jobs (replica.count).")
@click.option("--steps", type=int, help="Number of optimizer steps (trainer.max_steps).")
@click.option(
    "--engine",
    type=click.Choice(["vllm", "sim"]),
    default="vllm",
    show_default=True,
    help="sim: answers as vLLM does, learns nothing.",
)
@click.option(
    "--bucket",
    default="moto",
    show_default=True,
    help="moto (as strict as the Hub's buckets); moto:aws, moto:r2 or moto:minio (as strict as those); minio or "
    "seaweedfs (the programs themselves); or s3://bucket[/prefix] with AWS_* in the environment.",
)
@TRANSPORT
@click.option("--tls", is_flag=True, help="HTTPS everywhere between the Jobs, under an authority made for this run.")
@click.option("--run", "run_name", help="The run's name; made up from recipe and time if left out.")
@click.option("--faults", metavar="SPEC", help="What goes wrong, such as 'kill replica[1] at step 30'.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the training, the engines and the faults."
)
@click.option(
    "--gpus", metavar="0,0,1", help="The GPU of each Job: replicas first, trainer last; or none. All here if left out."
)
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="PATTERN=PYTHON",
    help="Interpreter that stands for images of that name, such as 'my/trainer:*=venv/bin/python'; may be given again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print summary.json last, alone on stdout.")
@click.option("--serve", is_flag=True, help="Start only the stand-in for the Hub, print its environment, and wait.")
def emulate(**options: Any) -> None:
    """Runs the whole loop on this machine: Jobs as local processes, a local bucket, real vLLM replicas.

    RECIPE is a name (see `asyncgrpo recipes`) or a TOML file; `digit` if left out.
    """
    from emulator import emulate as emulation

    if options.pop("serve"):
        sys.exit(emulation.serve(options["bucket"], options["tls"], options["images"]))
    sys.exit(emulation.emulate(emulation.Options(**options | {"recipe": options["recipe"] or "digit"})))


@main.group(cls=Commands)
@example("asyncgrpo role proxy --replica http://127.0.0.1:8001 --replica http://127.0.0.1:8002")
def role() -> None:
    """Runs one part of a run on this machine: trainer, replica or proxy. Their settings come from the environment."""


@role.command()
@example("ASYNCGRPO_RUN=my-run ASYNCGRPO_BUCKET=s3://my-bucket asyncgrpo role trainer")
def trainer() -> None:
    """Runs the training side: TRL's trainer with a proxy beside it."""
    from jobs import logs, trainer

    logs.to_stderr()
    sys.exit(trainer.run(os.environ))


@role.command()
@example("ASYNCGRPO_RUN=my-run ASYNCGRPO_REPLICA=0 ASYNCGRPO_BUCKET=s3://my-bucket asyncgrpo role replica")
def replica() -> None:
    """Runs the generation side: vLLM servers that take adapters from the bucket."""
    from jobs import logs, replica

    logs.to_stderr()
    sys.exit(replica.run(os.environ))


@role.command()
@example("asyncgrpo role proxy --port 8080 --replica http://127.0.0.1:8001 --replica http://127.0.0.1:8002")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=0, help="Port to listen on; any free one if left out.")
@click.option("--fd", type=int, help="Listening socket inherited from the supervisor, instead of host and port.")
@click.option("--replica", "replicas", multiple=True, metavar="URL", help="A replica's URL; may be given again.")
def proxy(host: str, port: int, fd: int | None, replicas: tuple[str, ...]) -> None:
    """Runs what TRL takes for one vLLM server: publishes adapters and routes completions to the replicas.

    Replicas announce themselves in the run's bucket; --replica adds others.
    """
    from jobs import logs, proxy

    logs.to_stderr()
    proxy.run(proxy.ProxySettings.from_env(os.environ, replicas, host, port, fd))


@main.command()
@example("asyncgrpo recipes digit")
@click.argument("name", required=False)
def recipes(name: str | None) -> None:
    """Lists the built-in recipes, or prints one as TOML."""
    from jobs import recipe

    click.echo(
        recipe.text(name).rstrip()
        if name
        else "\n".join(f"{each:10} {recipe.load(each).description}" for each in recipe.built_in())
    )


NAMESPACE = click.option("--namespace", help="User or organisation whose Jobs they are; the token's own if left out.")
BUCKET = click.option("--bucket", metavar="s3://BUCKET[/PREFIX]", help="ASYNCGRPO_BUCKET if left out.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")


@main.command()
@example("asyncgrpo launch sanity --bucket s3://my-bucket --dry-run")
@click.argument("recipe")
@click.option("--config", type=click.Path(dir_okay=False), help="TOML file whose fields replace the recipe's.")
@click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Replaces one field; may be given again."
)
@click.option("--run", "run_name", help="The run's name; made up from recipe and time if left out.")
@click.option("--resume", is_flag=True, help="Go on with a run that has ended (--run), from its last checkpoint.")
@TRANSPORT
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the training and the engines.")
@click.option("--dry-run", is_flag=True, help="Show the plan with its prices and every derived value; start nothing.")
@click.option("--no-jobs", is_flag=True, help="Only claim the run; print the environment for roles on other machines.")
@click.option("--follow", is_flag=True, help="Stay until the end and lead the run; Ctrl-C then cancels it.")
@NAMESPACE
@BUCKET
@JSON
def launch(**options: Any) -> None:
    """Runs a recipe on Hugging Face Jobs: one trainer, N replicas.

    RECIPE is a name (see `asyncgrpo recipes`) or a TOML file. HF_TOKEN, HF_ENDPOINT and AWS_* are read from the
    environment. Without --follow the run's trainer leads it, and this command ends when all Jobs are started.
    """
    from jobs import launcher

    sys.exit(launcher.launch(launcher.Options(**options), os.environ))


@main.command()
@example("asyncgrpo status digit-1129-230000 --bucket s3://my-bucket")
@click.argument("run", required=False)
@NAMESPACE
@BUCKET
@JSON
def status(run: str | None, namespace: str | None, bucket: str | None, as_json: bool) -> None:
    """Shows how a run is: its progress, replicas, Jobs, who leads it, and what it has cost so far.

    Without RUN it lists the runs of the namespace that have living Jobs.
    """
    from jobs import operate, site, status_view

    if run is None:
        runs = operate.runs(site.Account.named(os.environ, namespace))
        click.echo(json.dumps(runs)) if as_json else status_view.show_runs(runs, sys.stdout)
        return
    found = operate.Operation.from_env(os.environ, bucket, run).status()
    click.echo(json.dumps(found)) if as_json else status_view.show(found, sys.stdout)


@main.command()
@example("asyncgrpo logs digit-1129-230000 --role replica --index 1 --follow")
@click.argument("run")
@click.option("--role", type=click.Choice(["trainer", "replica"]), default="trainer", show_default=True)
@click.option("--index", type=int, default=0, show_default=True, help="Which replica.")
@click.option("--follow", is_flag=True, help="Go on until the Job is over.")
@BUCKET
def logs(run: str, role: str, index: int, follow: bool, bucket: str | None) -> None:
    """Prints the log of one of a run's Jobs; lost connections lose and repeat no line."""
    from jobs import operate

    for line in operate.Operation.from_env(os.environ, bucket, run).logs(role, index, follow):
        click.echo(line)


@main.command()
@example("asyncgrpo stop digit-1129-230000 --bucket s3://my-bucket")
@click.argument("run")
@BUCKET
@JSON
def stop(run: str, bucket: str | None, as_json: bool) -> None:
    """Ends a run: its lease, then all its Jobs, until none is left."""
    from jobs import operate

    ended = operate.Operation.from_env(os.environ, bucket, run).stop()
    click.echo(json.dumps({"cancelled": ended}) if as_json else f"cancelled {len(ended)} Jobs: none is left")


@main.command()
@example("asyncgrpo scale digit-1129-230000 --replicas 4")
@click.argument("run")
@click.option("--replicas", type=int, required=True, help="How many replicas there shall be from now on.")
@BUCKET
def scale(run: str, replicas: int, bucket: str | None) -> None:
    """Changes the number of replicas while the run goes on: new ones join, those too many are drained first."""
    from jobs import operate

    operate.Operation.from_env(os.environ, bucket, run).scale(replicas)
    click.echo(f"asked for {replicas} replicas; see: asyncgrpo status {run}")


@main.command()
@example("asyncgrpo reap --bucket s3://my-bucket --yes")
@click.option("--yes", is_flag=True, help="Do not ask.")
@NAMESPACE
@BUCKET
@JSON
def reap(yes: bool, namespace: str | None, bucket: str | None, as_json: bool) -> None:
    """Ends Jobs of runs that are over, that nobody leads any more, or whose deadline has passed."""
    from jobs import operate, site

    where = site.Site.from_env(os.environ, namespace, bucket)
    found, foreign = operate.reapable(where)
    for each in found:
        click.echo(
            f"{each.job.id}  {(each.job.labels or {})['asyncgrpo-run']}  {each.job.flavor}  {each.why}", err=True
        )
    for job in foreign:
        click.echo(f"{job.id}  bears a run's labels, but is not that run's: left alone", err=True)
    if found and (yes or click.confirm(f"Cancel {len(found)} Jobs?", err=True)):
        operate.reap(where, found)
    else:
        found = []
    click.echo(
        json.dumps({"cancelled": [each.job.id for each in found]}) if as_json else f"cancelled {len(found)} Jobs"
    )


@main.command()
@example("asyncgrpo doctor --bucket s3://my-bucket")
@NAMESPACE
@BUCKET
@JSON
def doctor(namespace: str | None, bucket: str | None, as_json: bool) -> None:
    """Checks token, Jobs, bucket, clock and this machine: each line is ok or says the fix; status 2 if one is bad."""
    from jobs import doctor

    sys.exit(doctor.run(os.environ, namespace, bucket, as_json))


@main.group(cls=Commands)
@example("asyncgrpo bench routing --json")
def bench() -> None:
    """Measures a part against its alternatives, in turn in the same run."""


@bench.command()
@example("asyncgrpo bench routing")
@JSON
def routing(as_json: bool) -> None:
    """Simulates rules of routing on GRPO traffic: cold completions, makespan, balance, for 1 to 256 replicas."""
    from jobs import bench_routing

    bench_routing.main(as_json)


@bench.command(name="proxy")
@example("asyncgrpo bench proxy --json")
@JSON
def bench_proxy(as_json: bool) -> None:
    """Measures the proxy beside a plain aiohttp reverse proxy (and vllm-router where installed): rate, delay, CPU."""
    from jobs import bench_proxy

    bench_proxy.main(as_json)


if __name__ == "__main__":
    main()
