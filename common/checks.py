"""What a script hands to CoTrainer, held against what can be trained on. Each of these mistakes
once gave a plausible run with wrong gradients; all raise a ValueError that says what is wrong.
"""

import torch

TWICE = (
    "at a second update its samples are not the player's own any more, and the loss has no ratio "
    "that would say so"
)


def check_players(players: dict):
    """name -> Player. Metrics begin with a player's name, and those of a batch of several with
    their adapter's; an adapter has one learning rate and one clipping norm.
    """
    for name, player in players.items():
        for other in players:
            for what in ("lr", "max_grad_norm"):
                mine, its = getattr(player, what), getattr(players[other], what)
                if player.adapter == players[other].adapter and mine != its:
                    raise ValueError(
                        f"{name!r} and {other!r} play with one adapter, which has one {what}; "
                        f"got {mine} and {its}"
                    )
    for name, player in players.items():
        functions = player.rewards if isinstance(player.rewards, list | tuple) else [None]
        names = [getattr(function, "__name__", None) for function in functions]
        if None in names or len(set(names)) < len(names):
            raise ValueError(
                f"the rewards of {name!r} must be a list of functions with names of their own, by "
                f"which they are logged; got {player.rewards!r:.80}"
            )
        if name in ("co", "eval") or "/" in name:
            raise ValueError(f"a player cannot be called {name!r}: other metrics begin with it")
        if player.adapter in players and players[player.adapter].adapter != player.adapter:
            other = (
                f"the player {player.adapter!r}, who plays with {players[player.adapter].adapter!r}"
            )
            raise ValueError(
                f"{name!r} plays with the adapter {player.adapter!r}, the name of {other}"
            )


def check_prompts(name: str, prompts: list):
    """Of a rollout or of `generate`: messages, and at least one."""
    if not prompts:
        raise ValueError(f"no rows for the {name}: there is nothing to sample")
    for prompt in prompts:
        messages = prompt if isinstance(prompt, list) else [None]
        if not all(
            isinstance(m, dict) and "role" in m and isinstance(m.get("content"), str)
            for m in messages or [None]
        ):
            example = '[{"role": "user", "content": "..."}]'
            raise ValueError(
                f"a prompt of the {name} must be messages, as {example}; got {prompt!r:.80}"
            )


def check_groups(name: str, prompts: list, group_size: int):
    """The rows of a rollout: adjacent groups, each of one prompt."""
    if len(prompts) % group_size:
        raise ValueError(
            f"{len(prompts)} rows for the {name} are not a multiple of its group of {group_size}"
        )
    for first in range(0, len(prompts), group_size):
        group = prompts[first : first + group_size]
        if any(prompt != group[0] for prompt in group):
            last = first + group_size - 1
            raise ValueError(
                f"rows {first} to {last} for the {name} are a group, whose rewards are compared "
                f"with each other, but their prompts differ; repeat each row {group_size} times in "
                f"a row, or give the player its group_size"
            )


def check_step(trainer, batches, needs_advantages: bool):
    """What `step` returned."""
    if not isinstance(batches, list) or not batches:
        raise ValueError(f"step must return a list of at least one batch; got {batches!r:.60}")
    if len({id(batch) for batch in batches}) < len(batches):
        raise ValueError(f"step must return a batch once: {TWICE}")
    for batch in batches:
        check_batch(trainer, batch, needs_advantages)
    rows, micro = len(batches[-1]["completion_mask"]), trainer.args.per_device_train_batch_size
    if rows > micro * trainer.args.steps_per_generation:
        parts = f"{trainer.args.steps_per_generation} micro-batches of {micro}"
        raise ValueError(
            f"the last batch of a step has {rows} rows, more than {parts} hold; give the run a "
            f"larger step, or return some of the rows in a batch before it"
        )


def check_batch(trainer, batch, needs_advantages: bool):
    """A batch that is going to be trained on."""
    if not isinstance(batch, dict) or "player" not in batch:
        raise ValueError("step must return batches that rollout or concat made: one has no player")
    name, A, mask = batch["player"], batch.get("advantages"), batch["completion_mask"]
    trainer._player(name)
    if batch.get("trained"):
        raise ValueError(f"a batch of the {name} has been trained on already: {TWICE}")
    if A is None and needs_advantages:
        raise ValueError(
            f"the {name}'s batch has no advantages: a player without reward functions has none "
            f"before pay(batch, rewards), or until you write batch['advantages']"
        )
    if A is not None:
        _check_advantages(name, A, mask)
    if (mask[..., 1:] > mask[..., :-1]).any() or not mask[..., :1].all():
        raise ValueError(
            "completion_mask must be ones, at least one, and then zeros: it says where a "
            "completion ends; advantages of 0 leave tokens out of the loss"
        )
    for key in ("texts", "notes"):
        if len(batch.get(key, mask)) != len(mask):
            raise ValueError(
                f"the {name}'s batch has {len(mask)} rows and {len(batch[key])} {key}; to leave "
                f"rows out, give them advantages of 0"
            )


def _check_advantages(name: str, A, mask: torch.Tensor):
    if not isinstance(A, torch.Tensor) or not A.is_floating_point():
        kind = A.dtype if isinstance(A, torch.Tensor) else type(A).__name__
        raise ValueError(f"the {name}'s advantages must be a tensor of floats; got {kind}")
    if A.shape not in (mask.shape, mask.shape[:1]):
        wanted = f"{tuple(mask.shape[:1])} or {tuple(mask.shape)}"
        raise ValueError(f"advantages must be (B,) or (B, T), here {wanted}; got {tuple(A.shape)}")
    if A.requires_grad:
        raise ValueError(f"the {name}'s advantages have a gradient, which they must not: detach()")
    if not A.isfinite().all():
        row = int((~A.isfinite()).nonzero()[0, 0])
        raise ValueError(f"the {name}'s advantages must be finite; they are not in row {row}")
