"""The command palette's entries, from the actions table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from textual.command import DiscoveryHit, Hit, Hits, Provider

from nanochat.ui.actions import Action
from nanochat.ui.chrome import actions_of

if TYPE_CHECKING:
    from nanochat.ui.main_screen import MainScreen


class ActionsProvider(Provider):
    """Finds actions by title and help."""

    async def discover(self) -> Hits:
        for action in self._actions():
            yield DiscoveryHit(_title(action), self._command(action), help=action.help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for action in self._actions():
            score = max(matcher.match(action.title), 0.8 * matcher.match(action.help))
            if score > 0:
                yield Hit(score, matcher.highlight(_title(action)), self._command(action), help=action.help)

    def _actions(self) -> Iterator[Action]:
        return (action for action in actions_of(self.screen) if action.in_palette)

    def _command(self, action: Action):  # type: ignore[no-untyped-def]
        main: MainScreen = self.screen  # type: ignore[assignment]
        return partial(main.run_from_palette, action)


def _title(action: Action) -> str:
    keys = f"  {action.key_label}" if action.key_label else ""
    return action.title + keys
