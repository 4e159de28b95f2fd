"""How the runs of a search are done: where, on what, going on with which, and in which parts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsim.cli.inputs import seconds
from dsim.cli.options import Jobs, OutputDirectory, Overwrite, file_path
from dsim.errors import InputError

if TYPE_CHECKING:
    from placement.cache import Cache, Store
    from placement.crew import Crew
    from placement.result import SearchResult
    from placement.runner import Progress
    from placement.search import Question
    from placement.shards import Ledger, Shard

#: The runs of a search in its output directory.
RUNS_FILE = "runs.sqlite"

Resume = Annotated[bool, typer.Option("--resume", help="Go on with the search in the output directory.")]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="With --resume: run what took too long or killed its worker again, too.")
]
CacheFile = Annotated[
    Path | None,
    typer.Option(
        "--cache", parser=file_path, metavar="FILE", help="Keep runs in FILE, and take those that are there from it."
    ),
]
DaskAddress = Annotated[
    str | None,
    typer.Option(
        "--dask", metavar="ADDRESS", help="Run on a Dask cluster: tcp://host:8786, or a scheduler file, not --jobs."
    ),
]
TimeLimit = Annotated[
    str | None,
    typer.Option(
        "--time-limit", metavar="TIME", help="CPU time of one placement's runs, as 60s; beyond it, it has failed."
    ),
]
ShardText = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Compare the I-th of N parts of the placements only; for --merge."),
]
MergeFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--merge",
        parser=file_path,
        metavar="DIR",
        help="Make one answer of the shards in DIR; may be repeated. Give the options of the shards.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """How the runs of a search are done.

    Args:
        jobs: local processes, where there is no Dask cluster.
        folder: output directory, whose own file has the runs unless `cache` is given.
        options: those of the command, to say what differs from the search that is there.
    """

    jobs: int
    dask: str | None = None
    folder: Path | None = None
    cache: Path | None = None
    time_limit_s: float | None = None
    resume: bool = False
    retry_failed: bool = False
    overwrite: bool = False
    shard: Shard | None = None
    merge: tuple[Path, ...] = ()
    options: str = ""

    @property
    def own(self) -> Path | None:
        """The file in the output directory that has the runs."""
        if self.folder is None or self.cache is not None:
            return None
        return self.folder / (RUNS_FILE if self.shard is None else f"runs{self.shard.suffix}.sqlite")

    def files(self, names: list[str]) -> list[str]:
        """Return the names of the files that will be in the output directory."""
        own = [] if self.own is None else [self.own.name]
        return [] if self.folder is None else own if self.shard is not None else [*names, *own]

    def check(self, names: list[str]) -> None:
        """See beforehand that results can be written to the output directory.

        Args:
            names: of the files that will be written beside the runs.

        Raises:
            InputError: there are some, and neither --resume nor --overwrite.
        """
        if self.folder is None:
            return
        from dsim.cli.output import OutputFolder

        OutputFolder(self.folder, overwrite=self.overwrite or self.resume).check([] if self.shard else names)
        own = self.own
        if self.retry_failed and own is not None and not own.exists():
            # Result files beside it would be of something else.
            hint = "leave it out, or give the directory of the search"
            raise InputError("--retry-failed", f"finds no {own.name}", value=str(self.folder), hint=hint)
        if own is None or not own.exists() or self.overwrite or self.resume:
            return
        rule = f"already has {own.name}, the runs of a search"
        hint = "go on with --resume, replace them with --overwrite, or give another directory"
        raise InputError("--output-dir", rule, value=str(self.folder), hint=hint)

    def check_shards(self, question: Question) -> None:
        """See beforehand that the shards to merge are all there.

        Raises:
            InputError: they are not, or are of another search.
        """
        if self.merge:
            with self._shards(question):
                return

    @contextlib.contextmanager
    def opened(self, question: Question) -> Iterator[Store | None]:
        """Provide what keeps the runs; nobody else uses it meanwhile.

        What is interrupted leaves its runs; what has ended leaves them in order.

        Raises:
            InputError: the file is of another search, or no cache.
        """
        from dsim.cli.output import make_folder
        from placement.cache import Cache, remove

        if self.cache is not None:
            with contextlib.closing(Cache(self.cache, remedy="give another file, or delete it")) as cache:
                # What did not end by itself elsewhere may end here.
                cache.forget_faults()
                yield cache
            return
        own = self.own
        if own is None or self.folder is None:
            yield None
            return
        with contextlib.ExitStack() as stack:
            make_folder(self.folder, stack)
            if self.overwrite and own.is_file() and own.stat().st_size:
                remove(own)
            cache = Cache(own, remedy="replace it with --overwrite, or give another directory")
            try:
                self._note(cache, question)
                yield cache
            except BaseException:
                cache.close(unless_empty=True)
                raise
            cache.settle()
            stack.pop_all()

    def _note(self, cache: Cache, question: Question) -> None:
        """Note in a new file what is asked, and see in another one that it is the same.

        Raises:
            InputError: it is not.
        """
        from dsim.version import __version__
        from placement.cache import question_id

        notes = {"question": question_id(question), "version": __version__, "options": self.options}
        there = cache.notes
        if not there and not cache.runs:
            cache.note(notes)
            return
        if there.get("question") != notes["question"]:
            raise InputError(
                "--output-dir",
                f"holds runs of another search: {_difference(there, notes)}",
                value=str(self.folder),
                hint="give another directory, or replace them with --overwrite",
            )
        if self.retry_failed:
            cache.forget_faults()

    @contextlib.contextmanager
    def crew(self, store: Store | None) -> Iterator[Crew]:
        """Provide what runs the simulations."""
        from placement.crew import Crew
        from placement.runner import local_processes

        with contextlib.ExitStack() as stack:
            if self.dask is not None:
                from placement.remote import dask_cluster

                yield Crew(stack.enter_context(dask_cluster(self.dask)), cache=store, time_limit_s=self.time_limit_s)
            else:
                local = stack.enter_context(local_processes(self.jobs))
                yield Crew(local, cache=store, time_limit_s=self.time_limit_s)

    def search(self, question: Question, crew: Crew, progress: Progress | None) -> SearchResult:
        """Return the answer, or that of one part of it, or the one that parts give together."""
        from placement.cache import Cache
        from placement.search import search
        from placement.shards import merge, search_shard

        if self.merge:
            from placement.cache import Beside
            from placement.crew import Crew

            with self._shards(question) as (ledgers, caches):
                wider = Crew(crew.executor, cache=Beside(crew.cache, caches), time_limit_s=crew.time_limit_s)
                return merge(question, ledgers, executor=wider, progress=progress)
        if self.shard is None:
            return search(question, executor=crew, progress=progress)
        result, ledger = search_shard(question, self.shard, executor=crew, progress=progress)
        assert isinstance(crew.cache, Cache)
        crew.cache.note({"ledger": ledger.to_text()})
        return result

    @contextlib.contextmanager
    def _shards(self, question: Question) -> Iterator[tuple[list[Ledger], list[Cache]]]:
        """Provide the ledgers and the runs of all shards."""
        from placement.cache import Cache
        from placement.shards import check_whole, read_ledger, shard_files

        with contextlib.ExitStack() as stack:
            caches, ledgers = [], []
            places = [folder.resolve() for folder in self.merge]
            for number, folder in enumerate(self.merge):
                if places[number] in places[:number]:
                    raise InputError("--merge", "is given twice", value=str(folder), hint="give every directory once")
                if not folder.is_dir():
                    hint = "give the directories that --shard wrote to"
                    raise InputError("--merge", "is no directory", value=str(folder), hint=hint)
                for path in shard_files(folder):
                    cache = Cache(path, remedy="run the shard again", read_only=True)
                    caches.append(stack.enter_context(contextlib.closing(cache)))
                    ledgers.append(read_ledger(cache))
            check_whole(question, ledgers)
            yield ledgers, caches

    def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write the results; with --resume, those that are there already must be the same.

        With --retry-failed they are of the same search before its failures were tried again, and are replaced.

        Raises:
            InputError: a file is there that this search has not written.
        """
        from dsim.cli.output import OutputFolder

        assert self.folder is not None
        kept = self.resume and not self.retry_failed
        present = [name for name in files if kept and (self.folder / name).exists()]
        foreign = [name for name in present if not _is(self.folder / name, files[name])]
        if foreign:
            rule = (
                f"already has {', '.join(foreign)}, not as this search writes {'it' if len(foreign) == 1 else 'them'}"
            )
            raise InputError("--output-dir", rule, value=str(self.folder), hint="move what is there away")
        fresh = {name: content for name, content in files.items() if name not in present}
        OutputFolder(self.folder, overwrite=self.overwrite or self.retry_failed).write(fresh)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Where the runs of a search are done, and what becomes of them."""

    jobs: Jobs = None
    dask: DaskAddress = None
    time_limit: TimeLimit = None
    output_dir: OutputDirectory = None
    resume: Resume = False
    retry_failed: RetryFailed = False
    overwrite: Overwrite = False
    cache: CacheFile = None


def asked_runs(
    options: RunOptions,
    *,
    workers: int,
    shard: str | None = None,
    merge: list[Path] | None = None,
    rerun: str,
) -> Runs:
    """Return how the options say that runs are done.

    Args:
        workers: as `options.jobs` is taken.
        rerun: the options of the command, as of `Runs.options`.

    Raises:
        InputError: options that do not go together.
    """
    from placement.shards import Shard

    resume, dask, output_dir, cache = options.resume, options.dask, options.output_dir, options.cache
    if resume and options.overwrite:
        raise InputError("--resume", "contradicts --overwrite", hint="leave one out")
    if options.retry_failed and not resume:
        raise InputError("--retry-failed", "needs --resume", hint="add --resume")
    if resume and output_dir is None:
        raise InputError("--resume", "needs the directory that the search wrote to", hint="add --output-dir")
    if resume and cache is not None:
        raise InputError(
            "--resume", "is not needed with --cache: the same command goes on by itself", hint="leave it out"
        )
    if dask is not None and options.jobs is not None:
        raise InputError("--jobs", "does not go with --dask: the cluster has its own workers", hint="leave one out")
    if dask is not None and not dask.strip():
        hint = "give the scheduler's address, as tcp://host:8786"
        raise InputError("--dask", "must not be empty", value=dask, hint=hint)
    part = None if shard is None else Shard.parse(shard, "--shard")
    if part is not None and merge:
        raise InputError("--shard", "does not go with --merge", value=shard, hint="merge when all shards have ended")
    if part is not None and (output_dir is None or cache is not None):
        hint = "give --output-dir, without --cache"
        raise InputError("--shard", "needs a directory for what it finds", value=shard, hint=hint)
    limit_s = None if options.time_limit is None else seconds("--time-limit", options.time_limit)
    if limit_s == 0:
        raise InputError("--time-limit", "must be > 0", value=options.time_limit, hint="as in 60s")
    return Runs(
        jobs=workers,
        dask=dask,
        folder=output_dir,
        cache=cache,
        time_limit_s=limit_s,
        resume=resume,
        retry_failed=options.retry_failed,
        overwrite=options.overwrite,
        shard=part,
        merge=tuple(merge or ()),
        options=rerun,
    )


@contextlib.contextmanager
def told_where_to_go_on(runs: Runs, *, quiet: bool) -> Iterator[None]:
    """Say on Ctrl-C, or SIGTERM, how to go on."""
    from dsim.cli.output import note

    try:
        yield
    except KeyboardInterrupt:
        if runs.own is not None and runs.own.exists():
            note(f"stopped; the same command with --resume goes on with {runs.folder}", quiet=quiet)
        raise


def _is(path: Path, content: str | bytes) -> bool:
    return path.is_file() and path.read_bytes() == (content if isinstance(content, bytes) else content.encode())


def _difference(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Return the first difference between two searches' notes, in words."""
    if there.get("version") != here["version"]:
        return f"they are of dsim {there.get('version')}, this is {here['version']}"
    then, now = _options(there.get("options", "")), _options(here["options"])
    for name in (*now, *then):
        if then.get(name) != now.get(name):
            return f"{name} is {_said(then.get(name))} there and {_said(now.get(name))} here"
    return "a latency profile, a trace or the code of dsim has changed since"


def _options(text: str) -> dict[str, object]:
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _said(value: object) -> str:
    return "not given" if value is None else json.dumps(value, ensure_ascii=False)
