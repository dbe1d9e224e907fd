"""What `fab image.build` does: the image of a run, for the engine of a host or for a Proxmox host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deploy import CHECKOUT, devices, image, pct_form, pct_image
from deploy.errors import USAGE, DeployError
from deploy.host import Host, Local
from deploy.pct_form import Archive, Form
from deploy.runtimes import compose
from deploy.settings import RunSettings
from deploy.target import Target

Progress = Callable[[str], None]
UNAME_TIMEOUT = 30.0  # seconds
PURPOSES = ("engine", "pct")


def purpose(goal: Target, given: str | None) -> str:
    """What the image is for: `given` (--for), else as the host's runtime has it."""
    if given is not None and given not in PURPOSES:
        raise DeployError(f"--for {given[:40]} must be engine or pct", code=USAGE)
    return given or ("pct" if goal.settings.runtime == "pct" else "engine")


def for_engine(goal: Target, run: RunSettings, build: str | None, progress: Progress) -> str:
    """Have the image of a run in the engine of the host, as a deploy would; its name. Raises DeployError."""
    if build not in (None, "host", "local"):
        raise DeployError(f"--build {build} must be host or local", code=USAGE)
    facts = goal.facts()
    wanted = compose.image(CHECKOUT, goal.settings, run, facts)
    if not isinstance(wanted, image.Image):
        if wanted is not None:
            raise DeployError(f"{run.name} has an image of its own (image: use), so there is none to build")
        raise DeployError(
            f"{goal.settings.name} runs {run.name} as plain processes, which need no image; set runtime: "
            "compose for it, or give --for pct for a Proxmox host"
        )
    where: image.Build = build or run.image.build or goal.settings.build or "host"  # type: ignore[assignment]
    image.make(goal.host, facts["state"]["root"], wanted, image.plan(facts, wanted, where), progress)
    return wanted.reference


def for_pct(
    goal: Target, run: RunSettings, form: str | None, progress: Progress, *, named: bool = True
) -> Archive:
    """The image of a run as an archive for the Proxmox host `goal`, made by this machine's engine.

    Unless the host is `named` (--host), `form` alone decides, and no host is asked. Raises DeployError.
    """
    pct_form.check_form(form)
    if not named and form is None:
        raise DeployError(
            "--for pct needs --host, a Proxmox host whose version decides the form, or --form oci or "
            "--form template",
            code=USAGE,
        )
    chosen: Form = "template"
    if form != "template":
        asked = pct_image.version(goal.host) if named else "9.1"
        chosen = pct_form.form_for(asked, form, goal.settings.name)
    architecture = _architecture(goal.host) if named else None
    if run.image.use is not None:
        return own(run.image.use, chosen, progress)
    variant = run.image.variant
    if variant == "auto":
        found = devices.choose(run.gpus, goal.facts(), run.name, goal.settings.name, "pct")
        variant = "gpu" if found.count else "cpu"
    return of_checkout(CHECKOUT, run.image, variant, chosen, architecture, progress)


def of_checkout(
    root: Path,
    settings: image.Settings,
    variant: str,
    form: Form,
    architecture: str | None,
    progress: Progress,
) -> Archive:
    """The image that the checkout `root` makes, as an archive. `architecture` None: of the engine here."""
    return of_image(image.describe(root, settings, variant), form, architecture, progress)


def of_image(wanted: image.Image, form: Form, architecture: str | None, progress: Progress) -> Archive:
    """The same for an image that is described already."""
    variant = wanted.arguments["VARIANT"]
    key = f"{wanted.digest[:12]}-{architecture}" if architecture else wanted.digest[:12]

    def build() -> str:
        try:
            image.there(Local(image.HERE), wanted.reference)
        except DeployError as error:
            raise DeployError(f"{error} (this machine's engine makes the images for Proxmox)") from None
        return image.build_whole_here(wanted, architecture, progress)

    return pct_image.pack(key, variant, form, progress, build=build)


def own(reference: str, form: Form, progress: Progress) -> Archive:
    """An image that was not made by us, of this machine's engine."""
    found = image.there(Local(image.HERE), reference)
    if found is None:
        raise DeployError(
            f"this machine's engine has no image {reference}, of which the archive for Proxmox is made; "
            "docker pull it here, or correct image: use in the run's file"
        )
    key = found.removeprefix("sha256:")[:12]
    return pct_image.pack(key, "own", form, progress, build=lambda: reference)


def _architecture(host: Host) -> str:
    """As Docker calls it: ``amd64``."""
    machine = host.run(["uname", "-m"], timeout=UNAME_TIMEOUT).text
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
