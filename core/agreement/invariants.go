package agreement

import "github.com/paceline/paceline/internal/invariant"

// checkAll holds every name against the invariants at Home.
func (h *Home) checkAll() {
	if !invariant.On {
		return
	}
	waiting := 0
	for id, n := range h.names {
		h.check(id, n)
		waiting += len(n.window)
	}
	invariant.Check(h.waiting == waiting, "%d operations wait, not %d", waiting, h.waiting)
}

// check holds one name against them; 3 and 5 are about what is told, and the tests hold them.
func (h *Home) check(id ID, n *name) {
	if !invariant.On {
		return
	}
	for count, a := range n.window {
		invariant.Check(a.ranks.Len() > 0 && a.t.Ranks.Covers(a.ranks), "1: %d of %q waits with ranks %v of %v", count, id.Name, a.ranks, a.t.Ranks)
		invariant.Check(!h.complete(a), "1: %d of %q waits though ranks %v of %v have come", count, id.Name, a.ranks, a.t.Ranks)
		missing := h.missing(a)
		invariant.Check(missing.Overlap(h.left).Len() == 0, "2: %d of %q waits for %v, of which %v have left", count, id.Name, missing, h.left)
		invariant.Check(!h.cfg.Elastic || a.t.brokenBy(h.left.Minus(a.ranks)) == "", "2: %d of %q waits, where ranks %v have gone", count, id.Name, h.left)
		invariant.Check(a.t.hinderedBy(h.joined.Minus(a.ranks)) == "", "2: %d of %q waits, where ranks %v have joined", count, id.Name, h.joined)
		_, reported := n.reported[count]
		invariant.Check(!reported, "4: %d of %q waits though its failure was told", count, id.Name)
		invariant.Check(!n.failed.covers(a.t, count), "4: %d of %q waits under generation %d, which has failed", count, id.Name, a.t.Generation)
		invariant.Check(a.t.Generation <= n.generation, "4: %d of %q has generation %d, after %d", count, id.Name, a.t.Generation, n.generation)
	}
}
