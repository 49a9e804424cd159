"""`perdure certify`: writes the certificate of a checkpoint, or checks one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from perdure.cli import options as cli
from perdure.cli.output import document, print_result, say


@cli.command("certify")
@cli.checkpoint_argument("checkpoint", "[RUN@STEP]", required=False)
@cli.output_option("The certificate; by default RUN-STEP.certificate.json.")
@click.option("--key", metavar="FILE", type=cli.PATH, help="Sign it with this key of ssh-keygen.")
@click.option("--check", metavar="FILE", type=cli.PATH, help="Check this certificate.")
@click.option("--run", metavar="RUN", help="Of --check: compare with this run directory.")
@click.option("--signers", metavar="FILE", type=cli.PATH, help="Of --check: the allowed signers.")
@click.option("--identity", metavar="NAME", help="Of --signers: who has to have signed.")
@click.option("--public-key", metavar="FILE", type=cli.PATH, help="Of --check: the signer's key.")
def certify(
    checkpoint: str | None,
    output: Path | None,
    key: Path | None,
    check: Path | None,
    as_json: bool,
    **against: Any,
) -> bool:
    """Write a certificate of the checkpoint RUN@STEP, or check one.

    It says which bits the checkpoint has, by which recipe and in which environment they were computed,
    and which steps a replay has computed again. All bytes are verified first. --check prints what is
    proved and what is not, and exits with 1 if anything that was asked for does not hold.

    \b
    Example:
      perdure certify runs/a@1000 -o a.json --key ~/.ssh/id_ed25519
      perdure certify --check a.json --run runs/a --public-key ada.pub
    """
    if (checkpoint is None) == (check is None):
        raise click.UsageError(
            "expected either RUN@STEP or --check FILE, whose run is given as --run RUN."
        )
    if any(against.values()) if check is None else output or key:
        raise click.UsageError(
            "expected -o and --key with RUN@STEP; with --check --run, and --public-key or --signers."
        )
    signers, public_key = against["signers"], against["public_key"]
    if (signers is None) != (against["identity"] is None) or (signers and public_key):
        raise click.UsageError("expected --signers with --identity, or --public-key alone.")
    for file in filter(None, (key, check, signers, public_key)):
        if not file.is_file():
            raise click.UsageError(f"{file}: expected a file, found none.")
    from perdure.checkpoint.address import open_checkpoint
    from perdure.look.certificate import certify, check_certificate

    if check is not None:
        found = check_certificate(check, **against)
        print_result(found, as_json)
        return not found.holds
    opened = open_checkpoint(str(checkpoint))
    written, fingerprint = certify(opened, output, key), opened.manifest.fingerprint
    signature = None if key is None else f"{written}.sig"
    if as_json:
        names = {"run": opened.run.where, "checkpoint": opened.name, "fingerprint": fingerprint}
        document({**names, "certificate": str(written), "signature": signature})
    else:
        say(f"{written}: {opened.name}, {fingerprint}")
        say(signature or "not signed: it proves nothing about who wrote it (--key)")
    return False
