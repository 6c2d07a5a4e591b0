"""Head and foot of every page: what was made of what, when, with which versions, and the command for it."""

import re
from dataclasses import dataclass, field
from typing import Any

from qdqbench.eval.report.formats import flat, label, model_label

VERSIONS = ("qdqbench", "torch", "transformers", "nvidia-modelopt", "onnxruntime")
_SECTION = re.compile(r'<section\b[^>]*\bid="([^"]+)"[^>]*>\s*<h2>(.*?)</h2>', re.DOTALL)
_MARKUP = re.compile(r"<[^>]+>|[\u2713\u2717\u26a0]")


@dataclass(frozen=True)
class Page:
    """What a page says of itself."""

    kind: str  # of page
    title: str  # name of the model
    about: list[str]  # task, recipe
    created: str
    command: str
    record: str  # the file beside it that holds every number
    environment: dict[str, Any]
    facts: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # names and values by heading
    recipe: dict[str, Any] | None = None

    @property
    def heading(self) -> str:
        """Model, task and recipe in a line."""
        return " · ".join([self.title, *self.about])

    @property
    def versions(self) -> str:
        """What accuracy and speed depend on: qdqbench 0.5.0, torch 2.11.0."""
        found = self.environment.get("versions", {})
        return ", ".join(f"{name} {found[name]}" for name in VERSIONS if name in found)

    @property
    def made(self) -> str:
        """When, for people."""
        return self.created.replace("T", " ").replace("+00:00", " UTC")

    @property
    def groups(self) -> dict[str, list[tuple[str, str]]]:
        """All names and values that its foot lists."""
        return self.facts | ({"Environment": flat(self.environment)} if self.environment else {})


def page_of(found: Any, kind: str, title: str, about: list[str], record: str, **more: Any) -> Page:
    """The page of a result with the fields `created` and `command`, and mostly `environment`."""
    environment = getattr(found, "environment", {})
    return Page(kind, title, about, found.created, found.command, record, environment, **more)


def page_of_choice(found: Any, kind: str, record: str, *more: tuple[str, str]) -> Page:
    """The page of a result that a recipe is chosen by: it has `model`, `task`, `data` and `seed` too."""
    facts = [*flat(found.model, "model"), *flat(found.data, "data"), ("seed", str(found.seed)), *more]
    title, about, recipe = model_label(found.model["name"]), [label(found.task["name"])], None
    if hasattr(found, "recipe"):
        recipe = found.recipe
        about.append(recipe["name"])
    return page_of(
        found, kind, title, about, record, facts={"Model, data and settings": facts}, recipe=recipe
    )


def contents(body: str) -> list[tuple[str, str]]:
    """Anchors and headings of the sections of a page, for its table of contents."""
    return [(anchor, _MARKUP.sub("", heading).strip()) for anchor, heading in _SECTION.findall(body)]
