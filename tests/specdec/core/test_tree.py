"""TokenTree against a naive model: a tree is the ordered list of its nodes' paths from the root."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from specdec.core.tree import EMPTY_TREE, MAX_CONFIDENCE, ROOT, SparseDistribution, TokenTree

VOCAB = 4
Path = tuple[int, ...]
paths_st = st.lists(st.integers(0, VOCAB - 1), max_size=5).map(tuple)


def of_paths(paths: list[Path], *, probs: bool = False) -> TokenTree:
    """The tree whose nodes have these paths, which are in order, each after its parent."""
    return TokenTree(
        tuple(path[-1] for path in paths),
        tuple(paths.index(path[:-1]) if len(path) > 1 else ROOT for path in paths),
        tuple(marker(path) for path in paths) if probs else (),
        tuple(confidence(path) for path in paths) if probs else (),
    )


def marker(path: Path) -> SparseDistribution:
    """A distribution that tells of which node it is."""
    return SparseDistribution(path, (1.0,) * len(path))


def confidence(path: Path) -> int:
    """The same, as far as it goes."""
    return 1 + sum(path) % MAX_CONFIDENCE


def paths_of(tree: TokenTree) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    return paths


@st.composite
def ordered_paths(draw, max_nodes: int = 12) -> list[Path]:
    paths: list[Path] = []
    for _ in range(draw(st.integers(0, max_nodes))):
        path = (*draw(st.sampled_from([(), *paths])), draw(st.integers(0, VOCAB - 1)))
        if path not in paths:
            paths.append(path)
    return paths


@given(ordered_paths())
def test_the_naive_model_and_the_tree_agree(paths):
    tree = of_paths(paths)
    assert tree.problem(VOCAB) is None
    assert paths_of(tree) == paths
    assert len(tree) == len(paths)
    assert bool(tree) == bool(paths)
    assert tree.depths == tuple(len(path) - 1 for path in paths)
    assert tree.is_chain == all(len(path) == node + 1 for node, path in enumerate(paths))


@given(ordered_paths(), st.integers(0, 15), st.booleans())
def test_a_prefix_of_a_tree_is_a_tree(paths, num_nodes, probs):
    tree = of_paths(paths, probs=probs).prefix(num_nodes)
    assert tree == of_paths(paths[:num_nodes], probs=probs)
    assert tree.problem(VOCAB) is None


@given(ordered_paths(), paths_st)
def test_walk_finds_exactly_the_paths_of_the_tree(paths, path):
    tree = of_paths(paths)
    assert tree.walk(()) == ROOT
    assert tree.walk(path) == (paths.index(path) if path in paths else ROOT if path == () else None)
    for node, existing in enumerate(paths):
        assert tree.walk(existing) == node
        parent = paths.index(existing[:-1]) if len(existing) > 1 else ROOT
        assert tree.child(parent, existing[-1]) == node


@given(ordered_paths(), st.booleans())
def test_below_a_node_is_the_tree_of_its_descendants(paths, probs):
    tree = of_paths(paths, probs=probs)
    assert tree.below(ROOT) == (tree, tuple(range(len(tree))))
    for node, root in enumerate(paths):
        kept = [i for i, path in enumerate(paths) if len(path) > len(root) and path[: len(root)] == root]
        sub, indices = tree.below(node)
        assert indices == tuple(kept)
        assert paths_of(sub) == [paths[i][len(root) :] for i in kept]
        assert sub.problem(VOCAB) is None
        assert sub.draft_probs == (tuple(marker(paths[i]) for i in kept) if probs else ())
        assert sub.confidence == (tuple(confidence(paths[i]) for i in kept) if probs else ())


@given(ordered_paths(), paths_st)
def test_descending_keeps_what_still_matches_and_drops_the_rest(paths, path):
    expected = [p[len(path) :] for p in paths if len(p) > len(path) and p[: len(path)] == path]
    assert paths_of(of_paths(paths).descend(path)) == expected


@given(ordered_paths(), ordered_paths(), st.booleans(), st.booleans())
def test_merging_is_the_union_and_keeps_the_first_trees_nodes_in_place(mine, theirs, first, second):
    """Also where only one of them has distributions."""
    merged = of_paths(mine, probs=first).merge(of_paths(theirs, probs=second))
    assert paths_of(merged) == [*mine, *(path for path in theirs if path not in mine)]
    assert merged.problem(VOCAB) is None
    known = {*(mine if first else ()), *(theirs if second else ())}
    assert list(merged.confidence) == [confidence(path) * (path in known) for path in paths_of(merged)] * bool(known)
    if first and second:
        assert merged.draft_probs == tuple(marker(path) for path in paths_of(merged))


@given(ordered_paths(), paths_st, st.booleans())
def test_under_a_path_every_node_moves_down_by_it(paths, path, probs):
    moved = of_paths(paths, probs=probs).under(path)
    chain = [path[: length + 1] for length in range(len(path))]
    assert paths_of(moved) == [*chain, *(path + p for p in paths)]
    assert moved.problem(VOCAB) is None
    assert moved.descend(path) == of_paths(paths, probs=probs and bool(paths))
    if probs and paths:
        assert moved.draft_probs == (*(None for _ in path), *(marker(p) for p in paths))
        assert moved.confidence == (*(0 for _ in path), *(confidence(p) for p in paths))


@given(ordered_paths(), st.integers(0, 12))
def test_the_nodes_since_a_prefix_are_all_that_the_prefix_lacks(paths, num_nodes):
    tree = of_paths(paths, probs=True)
    older = tree.prefix(num_nodes)
    path, new = tree.since(num_nodes)
    in_place = new.under(path)
    assert new.problem(VOCAB) is None
    assert older.merge(in_place).token_ids == tree.token_ids
    assert older.merge(in_place).parents == tree.parents
    assert older.merge(in_place).confidence == tree.confidence
    needed = {p[:length] for p in paths[num_nodes:] for length in range(1, len(p) + 1)}
    assert set(paths_of(in_place)) == needed, "and no more than leads to it"
    lone = [p for p in paths[:num_nodes] if len(p) == len(path) + 1 and p[: len(path)] == path and p in needed]
    assert len(lone) != 1 or any(p[:-1] == path for p in paths[num_nodes:]), "the path is as long as it can be"


@given(paths_st)
def test_a_chain_is_a_tree(tokens):
    chain = TokenTree.chain(tokens)
    assert chain.is_chain
    assert paths_of(chain) == [tokens[: length + 1] for length in range(len(tokens))]
    assert EMPTY_TREE.under(tokens) == chain


def test_the_empty_tree_is_no_draft():
    assert not EMPTY_TREE
    assert EMPTY_TREE.is_chain
    assert EMPTY_TREE.problem(VOCAB) is None
    assert EMPTY_TREE.descend([1]) is EMPTY_TREE
    assert EMPTY_TREE.walk([1]) is None


@given(ordered_paths(), st.lists(st.integers(-2, 13), max_size=5))
def test_a_path_leads_from_the_root_downwards(paths, nodes):
    tree = of_paths(paths)
    spelled = [path for node in nodes if node >= 0 for path in paths[node : node + 1]]
    downwards = [len(path) for path in spelled] == list(range(1, len(nodes) + 1))
    joined = all(later[:-1] == earlier for earlier, later in itertools.pairwise(spelled))
    assert tree.is_path(nodes) == (len(spelled) == len(nodes) and downwards and joined)
