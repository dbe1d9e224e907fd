"""The template that a release's container is made from: one that is there, or an image that is brought there.

What `fab image.build --for pct` makes, a deploy makes by itself: an image of this machine's engine becomes
one file in the template storage of the host. It is needed once for each container.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deploy.errors import DeployError
from deploy.host import Host
from deploy.release import Image
from deploy.runtimes.pct import VOLUME

if TYPE_CHECKING:
    from deploy.plan import Plan

Report = Callable[[str], None]


def words(image: Image) -> str:
    """The plan's words for what happens if the release has no container yet."""
    if VOLUME in image.reference:
        return "as it is on the host"
    return "made into a template here and brought there, if its container is still to be made"


def provide(plan: Plan, host: Host, facts: Mapping[str, Any], image: Image | None, report: Report) -> str:
    """Have the template on the host; its volume, like ``local:vztmpl/x.tar.zst``. Raises DeployError."""
    reference = image.reference if image else str(plan.image)
    if VOLUME in reference:
        return reference
    if image is None:
        raise DeployError(
            f"the container of release {plan.release} of {plan.name} is gone from {plan.host}, and with it "
            "its image; fab deploy makes one, from the commit that made that release if it must be the same"
        )
    from deploy import image as images
    from deploy import image_tasks, pct_form, pct_image  # (most deploys make no container)

    storage = str((plan.making or {})["template_storage"])
    known = facts["pve"]
    form = pct_form.form_for(known["version"] or pct_image.version(host), None, host.name)
    if isinstance(image, images.Image):
        archive = image_tasks.of_image(image, form, known["arch"], report)
    else:
        archive = image_tasks.own(reference, form, report)
    place = pct_image.directory(host, storage)
    return f"{storage}{VOLUME}{pct_image.ensure(host, archive, place, report)}"
