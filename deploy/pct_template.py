"""The template that a release's container is made from: one's own, or the image of this checkout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deploy.errors import DeployError
from deploy.host import Host
from deploy.release import Image

if TYPE_CHECKING:
    from deploy.plan import Plan

Report = Callable[[str], None]


def provide(plan: Plan, host: Host, facts: Mapping[str, Any], image: Image | None, report: Report) -> str:
    """Have the template on the host; its volume, like ``local:vztmpl/x.tar.zst``. Raises DeployError."""
    reference = image.reference if image else str(plan.image)
    if ":vztmpl/" in reference:
        return reference
    if image is None:
        raise DeployError(
            f"the container of release {plan.release} of {plan.name} is gone from {plan.host}, and "
            "with it its image; fab deploy makes one, from the commit that made that release if it must be "
            "the same"
        )
    raise DeployError(
        f"an image of this checkout cannot be brought to {plan.host} yet; name a template that is there, "
        "like image: {use: local:vztmpl/my.tar.zst}"
    )
