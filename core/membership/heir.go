package membership

import (
	"encoding/binary"
	"hash/fnv"
	"slices"
)

// Heir is the server that a key has in the epoch: its own while that is live, and else the one with the greatest weight for the key among those
// that stayed when its own departed (rendezvous hashing: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998); where
// that has departed later, its heir. So every node finds the same one by itself, whatever it has declared and in whatever order it hears of
// losses and joins, and a later loss moves the keys of the lost server alone. A server that joined after a departure inherits nothing of it.
// Of a key that the scheduler has moved it is the server of the last move, or its heir.
func (e *Epoch) Heir(k Key, server int) int {
	return e.HeirAmong(k, server, func(i int) bool { return e.Servers[i].State == Live })
}

// HeirAmong is Heir where some other servers are there: those that a rank has not left yet.
func (e *Epoch) HeirAmong(k Key, server int, there func(server int) bool) int {
	if to, moved := e.moved.to[place{k.Number, k.Part}]; moved {
		server = to
	}
	for !there(server) {
		next := e.successor(k.Name, k.Part, server)
		if next == server {
			break
		}
		server = next
	}
	return server
}

// successor is the server that a key went to when its own departed; its own where there is none.
func (e *Epoch) successor(name Name, part, server int) int {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name.Name)) // never fails
	_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, uint64(name.Set)<<32|uint64(part)))
	key, heir, most := h.Sum64(), server, uint64(0)
	among, away := e.stayed(server)
	for i := range among {
		if weight := mix(key ^ mix(uint64(i)+1)); weight >= most && i != server && !slices.Contains(away, i) {
			heir, most = i, weight
		}
	}
	return heir
}

// stayed says who stayed when a server departed: of so many, all but those that had gone before it. Where that is forgotten, all who are live.
func (e *Epoch) stayed(server int) (among int, away []int) {
	for _, d := range e.gone {
		number := d.Number
		if d.Role == WorkerRole { // with it went the server in its process, whose place no other gets in an elastic job
			number = slices.IndexFunc(e.Servers, func(s Server) bool { return s.Rank == d.Number })
		}
		if number == server {
			return min(d.Among, len(e.Servers)), away
		}
		away = append(away, number)
	}
	away = away[:0]
	for i := range e.Servers {
		if e.Servers[i].State != Live {
			away = append(away, i)
		}
	}
	return len(e.Servers), away
}

// mix spreads the bits of a number (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Inherited is a tensor with the servers that its keys have in the epoch; itself where none has moved.
func (e *Epoch) Inherited(t *Tensor) *Tensor {
	servers := slices.Clone(t.Servers)
	for part, s := range servers {
		servers[part] = e.Heir(t.key(part), s)
	}
	if slices.Equal(servers, t.Servers) {
		return t
	}
	moved := *t
	moved.Servers = servers
	return &moved
}
