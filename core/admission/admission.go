// Package admission decides which peers keep their place at a listener while they have not proved the job secret.
//
// Peers without the secret cost a listener memory and a file descriptor each, so their number is bounded, in total and
// for each source address. A newcomer always gets a place: refusing it instead, as OpenSSH's MaxStartups does, lets peers
// that are silent from the first byte on keep honest ones out for as long as the handshake may take. A peer that has
// waited makes room for it, drawn at random so that an attacker cannot predict it, from the source with the most peers so
// that a source pays for itself (PerSourceMaxStartups). An honest peer needs a few round trips; it is mostly among the
// youngest, which rarely have to go, and where it has to go it connects again.
package admission

import (
	"slices"

	"github.com/paceline/paceline/internal/invariant"
)

// Bounds are the numbers of peers that a listener keeps.
type Bounds struct {
	Total     int
	PerSource int
}

// Gate holds the unproved peers of one listener. It is not safe for concurrent use.
type Gate[P comparable] struct {
	bounds  Bounds
	draw    func(n int) int // a number below n, at random
	sources map[string][]P  // by source, the oldest first; none is empty
	source  map[P]string
}

// New makes a gate. draw returns a random number from 0 to n-1.
func New[P comparable](bounds Bounds, draw func(n int) int) *Gate[P] {
	return &Gate[P]{bounds: bounds, draw: draw, sources: map[string][]P{}, source: map[P]string{}}
}

// Expect raises the bounds of a gate where so many honest peers may arrive at once, from one source: it keeps twice as many of
// that, and as many of others as before.
func (g *Gate[P]) Expect(peers int) {
	others := g.bounds.Total - g.bounds.PerSource
	g.bounds.PerSource = max(g.bounds.PerSource, 2*peers)
	g.bounds.Total = g.bounds.PerSource + others
}

// Bounds are those of now.
func (g *Gate[P]) Bounds() Bounds { return g.bounds }

// Arrive gives a new peer a place. Where that exceeds a bound, another peer has lost its place: dropped is that peer.
func (g *Gate[P]) Arrive(peer P, source string) (dropped P, full bool) {
	switch {
	case len(g.sources[source]) >= g.bounds.PerSource:
		dropped, full = g.victim(source), true
	case len(g.source) >= g.bounds.Total:
		dropped, full = g.victim(g.crowded()), true
	}
	if full {
		g.Leave(dropped)
	}
	g.sources[source] = append(g.sources[source], peer)
	g.source[peer] = source
	if invariant.On {
		invariant.Check(len(g.source) <= g.bounds.Total, "a gate for %d peers holds %d", g.bounds.Total, len(g.source))
	}
	return dropped, full
}

// Leave frees the place of a peer that has proved the secret, or has gone. It is false for a peer that had no place any more.
func (g *Gate[P]) Leave(peer P) bool {
	source, here := g.source[peer]
	if !here {
		return false
	}
	delete(g.source, peer)
	peers := g.sources[source]
	if i := slices.Index(peers, peer); len(peers) > 1 {
		g.sources[source] = slices.Delete(peers, i, i+1)
	} else {
		delete(g.sources, source)
	}
	return true
}

// victim is the older one of two random peers of a source.
func (g *Gate[P]) victim(source string) P {
	peers := g.sources[source]
	return peers[min(g.draw(len(peers)), g.draw(len(peers)))]
}

// crowded is the source with the most peers, of equals a random one: with many addresses of one peer each, nobody is certain to lose.
func (g *Gate[P]) crowded() string {
	var most []string
	peers := 0
	for source, of := range g.sources {
		if len(of) > peers {
			most, peers = most[:0], len(of)
		}
		if len(of) == peers {
			most = append(most, source)
		}
	}
	if len(most) == 1 {
		return most[0]
	}
	slices.Sort(most) // so that runs repeat
	return most[g.draw(len(most))]
}
