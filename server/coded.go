package server

import (
	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/server/room"
)

// coding is what a value of a coded tensor has besides.
type coding struct {
	*room.Coding
	codec  codec.Codec // of pushes
	before uint64      // iterations that the tensor had before it was declared, as the rank says that knows of most
}

func newCoding(p *room.Part) *coding {
	if p.Coding == nil {
		return nil
	}
	return &coding{Coding: p.Coding, codec: p.Pushes}
}

// had takes in a rank's word of how many iterations the tensor had before. Callers hold the value's mu.
func (c *coding) had(iterations uint32) {
	if c != nil {
		c.before = max(c.before, uint64(iterations))
	}
}
