"""Costs as the flags of `zerobubble plan` and `compare` give them: scalars, or the file of --costs, which is read once; and
lengths of microbatches and links of ranks that are not alike.

The file is a plan, its costs alone, or a run's `report.json`, of which the last iteration counts. Where it has costs by length, a
list of lengths is planned with those.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megatron.zerobubble.cli.parser import workers_of
from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.files import read_given
from megatron.zerobubble.messages import parse_json, quoted, shown
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import check_tokens
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.costs.slicing import NUMBERS_OF_SLICES
from megatron.zerobubble.plan.costs.step_costs import STEP_TIMES
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.plan_request import SCALARS, PlanRequest
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.registry import parse_max_pending_backward, parse_num_slices
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.profiling.report import COSTS_BY_LENGTH, FORMAT, last_iteration


def add_slice_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags for slices of microbatches to a planning command."""
    command.add_argument(
        "--slices",
        default="1",
        metavar="N",
        help="cut each microbatch into N slices along its sequence, with --microbatch-tokens the longest, and shorter ones into "
        "as many as have about the same work; auto tries 1, 2, 4, 8 and 16 (default %(default)s)",
    )
    command.add_argument("--sequence-length", type=int, help="tokens of a sequence, for --slices without --microbatch-tokens")
    command.add_argument(
        "--key-share",
        type=float,
        default=0.0,
        help="share of F's activation memory that is keys and values, which slices keep from a microbatch's first F to its last "
        "B (default %(default)s; without recomputation 4/34 with as many KV heads as heads)",
    )
    command.add_argument(
        "--pass-overhead-ms",
        type=float,
        default=0.0,
        help="what each F, B and W takes besides the work of its tokens, in ms, which every slice takes again (default "
        "%(default)s)",
    )


def add_step_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags for what surrounds the passes to a planning command."""
    for name, meaning in (
        ("reduce", "reduction of a rank's gradients over replicas, beside its last Ws"),
        ("gather", "gathering of a rank's parameters over replicas, before and beside the first F of each stage"),
        ("optimizer", "optimizer step of a rank"),
        ("snapshot", "snapshot before an optimistic step, with post-validation"),
    ):
        command.add_argument(f"--{name}-ms", type=float, default=0.0, help=f"{meaning}, in ms (default %(default)s)")


def add_all_to_all_flag(command: argparse.ArgumentParser) -> None:
    """Add the flag for communication inside F and B to a planning command."""
    command.add_argument(
        "--all-to-all",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of F and of B in which tokens travel between ranks of expert parallelism (EP); an F and a B that run "
        "together hide it (default %(default)s)",
    )


def add_unequal_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags to a planning command."""
    command.add_argument(
        "--microbatch-tokens",
        metavar="LIST",
        help="tokens of every microbatch, separated by commas, or a file of them (- reads standard input); the times are then "
        "those of a microbatch of the mean length, and the plan assigns microbatches to its slots",
    )
    command.add_argument(
        "--attention-share",
        type=float,
        default=0.0,
        help="share of F's time in attention, which grows with the square of the length (default %(default)s)",
    )
    command.add_argument(
        "--links",
        metavar="FILE",
        help="JSON with latency_ms and optionally gigabytes_per_s, one row per sending and one column per receiving rank, "
        "in place of --comm-ms",
    )
    command.add_argument(
        "--bytes-per-token", type=float, default=0.0, help="bytes of a message per token, for links with a bandwidth"
    )


def read_request(args: argparse.Namespace, *, more_slices: tuple[int, ...] = ()) -> PlanRequest:
    """Read the flags of a planning command; the number of microbatches follows from the lengths if it is not given.

    Args:
        args: parsed.
        more_slices: numbers of slices that are planned for besides those of --slices.

    Raises:
        ConfigError: lengths that are not whole numbers of 1 or more, their number differs from the number of microbatches, a
            matrix of links that is of another size, costs that are out of range, or a flag that says something about lengths or
            links that are not given or measured.
        PlanError: a file that is not JSON, has no costs, or is not an object of matrices of links.
    """
    lengths, of_file, model = _read_lengths(args), None, None
    num_microbatches = _num_microbatches(args, lengths.tokens)
    if args.costs is not None:
        of_file, model = _read_file(args.costs)
    is_measured = of_file is not None and of_file.table.is_alike and of_file.table.has_slices
    num_slices = _read_slices(args, more_slices, are_measured=is_measured)
    most = max((*num_slices, *more_slices))
    if of_file is not None and is_measured and not of_file.table.tokens:
        raise ConfigError(f"{shown(args.costs)} has costs of slices and not their lengths; give a file of a run")
    if args.costs is not None and model is not None and (lengths.tokens or most > 1):
        if args.attention_share != 0:
            raise ConfigError(
                f"--attention-share is {args.attention_share:g} and {shown(args.costs)} has measured costs by length; "
                "drop the share"
            )
        lengths = replace(lengths, model=model)
    if most > 1 and not is_measured:
        lengths = replace(
            lengths,
            sequence_length=max(lengths.tokens, default=args.sequence_length),
            key_share=args.key_share,
            overhead_ms=args.pass_overhead_ms,
        )
    pending = getattr(args, "max_pending_backward", None)
    return PlanRequest(
        schedule=getattr(args, "schedule", AUTO),
        num_ranks=args.num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=getattr(args, "num_chunks", None),
        num_slices=num_slices,
        max_pending_backward=None
        if pending is None
        else parse_max_pending_backward("--max-pending-backward", pending, args.num_ranks),
        options=SearchOptions(
            memory_limit=getattr(args, "memory_limit", None),
            objective=Objective(args.objective),
            seed=args.seed,
            workers=workers_of(args),
        ),
        effort=None if args.effort is None else Effort(args.effort),
        times={name: getattr(args, name) for name in SCALARS},
        step={name: getattr(args, name) for name in STEP_TIMES},
        all_to_all=args.all_to_all,
        stages=of_file,
        lengths=lengths,
    )


def _num_microbatches(args: argparse.Namespace, tokens: tuple[int, ...]) -> int:
    if args.num_microbatches is None:
        if not tokens:
            raise ConfigError("the number of microbatches is missing: give --num-microbatches, or --microbatch-tokens")
        return len(tokens)
    if tokens and len(tokens) != args.num_microbatches:
        raise ConfigError(
            f"--microbatch-tokens has {len(tokens)} lengths and --num-microbatches is {args.num_microbatches}; "
            "give one per microbatch"
        )
    return int(args.num_microbatches)


def _read_slices(args: argparse.Namespace, more: tuple[int, ...], *, are_measured: bool) -> tuple[int, ...]:
    """The numbers of slices to plan for, and refuse the other flags about slices without any, or where slices were measured."""
    number = parse_num_slices("--slices", args.slices)
    chosen = NUMBERS_OF_SLICES if number is None else (number,)
    if max((*chosen, *more)) == 1 or are_measured:
        for name in ("sequence_length", "key_share", "pass_overhead_ms"):
            if getattr(args, name):
                why = f"{shown(args.costs)} has measured costs of slices" if are_measured else "microbatches are whole"
                flag = f"--{name.replace('_', '-')} is {getattr(args, name):g}"
                raise ConfigError(f"{flag} and {why}; {'drop it' if are_measured else 'give --slices, or drop it'}")
    elif args.microbatch_tokens is not None:
        if args.sequence_length is not None:
            raise ConfigError(
                "--sequence-length is for microbatches of one length, and --microbatch-tokens gives each its own; drop one"
            )
    elif args.sequence_length is None:
        raise ConfigError("slices need the tokens of a sequence: give --sequence-length")
    return chosen


def _read_file(name: str) -> tuple[CostModel, LengthModel | None]:
    body = parse_json(read_given(name, may_be_stdin=False), name, PlanError)
    if not isinstance(body, dict):
        return CostModel.from_json(body), None
    given = last_iteration(body, shown(name)).get("costs") if body.get("format") == FORMAT else body.get("costs", body)
    costs = CostModel.from_json(given)  # type: ignore[arg-type]
    if COSTS_BY_LENGTH not in body:
        return costs, None
    model = LengthModel.from_json(body[COSTS_BY_LENGTH])
    if model.num_stages != costs.num_stages:
        raise ConfigError(
            f"{shown(name)} has costs by length of {model.num_stages} stages and costs of {costs.num_stages}; "
            "give those of one run"
        )
    return costs, model


def _read_lengths(args: argparse.Namespace) -> LengthsAndLinks:
    tokens = () if args.microbatch_tokens is None else _read_tokens(args.microbatch_tokens)
    _check_used(args)
    return LengthsAndLinks(tokens, args.attention_share, None if args.links is None else _read_links(args, tokens))


def _check_used(args: argparse.Namespace) -> None:
    """Refuse a share and a size that nothing would come of."""
    share, size = args.attention_share, args.bytes_per_token
    if share != 0 and args.microbatch_tokens is None and args.slices == "1":
        raise ConfigError(
            f"--attention-share is {share:g} and all microbatches are equal and whole; give --microbatch-tokens or --slices, or "
            "drop it"
        )
    if not size >= 0:
        raise ConfigError(f"--bytes-per-token is {size:g}; give a number of 0 or more")
    if size > 0 and (args.microbatch_tokens is None or args.links is None):
        raise ConfigError(
            f"--bytes-per-token is {size:g} and there are no tokens or no links; give --microbatch-tokens and --links, or drop it"
        )


def _read_tokens(given: str) -> tuple[int, ...]:
    text = given
    if given == "-" or not given.replace(",", "").replace(" ", "").isdecimal():
        if given != "-" and not _is_file(given):
            raise ConfigError(
                f"--microbatch-tokens is {quoted(given)}; give whole numbers separated by commas, or a file of them"
            )
        text = read_given(given)
    words = text.translate(str.maketrans("[],", "   ")).split()
    try:
        tokens = tuple(map(int, words))
    except ValueError as error:
        raise ConfigError(f"--microbatch-tokens: {error}; give whole numbers, 1 or more") from None
    check_tokens(tokens)
    return tokens


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # a list that is longer than a name can be
        return False


def _read_links(args: argparse.Namespace, tokens: tuple[int, ...]) -> Links:
    links = Links.from_json(parse_json(read_given(args.links), args.links, PlanError))
    if links.num_ranks != args.num_ranks:
        raise ConfigError(
            f"{args.links} has links of {links.num_ranks} ranks and --num-ranks is {args.num_ranks}; "
            "give one row and one column per rank"
        )
    if args.bytes_per_token > 0 and tokens:
        links = replace(links, message_bytes=tuple(args.bytes_per_token * count for count in tokens))
    if links.gigabytes_per_s and not any(links.message_bytes):
        raise ConfigError(
            f"{args.links} has gigabytes_per_s and messages of 0 bytes; give --bytes-per-token with --microbatch-tokens, or "
            "message_bytes in the file"
        )
    return links
