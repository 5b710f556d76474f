// Package options holds the options of a tensor, each group in a small structure of its own. Operations carry them
// from the C ABI to the engine (worker.Op), and declarations on to the servers (wire.Tensor), as one value: a new
// option is one field here, and no layer between names it.
package options

import (
	"fmt"
	"math"

	"github.com/paceline/paceline/internal/limits"
)

// Declared are the options that a tensor is declared with. All ranks must agree on them. The zero value is
// all defaults.
type Declared struct {
	Sync     Sync   `json:"sync,omitzero"`
	Codec    string `json:"codec,omitempty"`    // how payloads are encoded, as codec.Parse reads it; in an operation also a policy; "" is plain, in an operation the job's
	PullGate Gate   `json:"pull_gate,omitzero"` // of a held value: answers to reads that are not sent
	// Authenticated says that receivers interpret the bytes, for example unpickle them: they have authentication tags on every
	// connection, whatever PACELINE_INTEGRITY says.
	Authenticated bool `json:"authenticated,omitempty"`
}

// Sync says how far ranks may be apart.
type Sync struct {
	Model    string `json:"model,omitempty"`     // as condition.Parse reads it; "" is BSP
	SoftPark bool   `json:"soft_park,omitempty"` // of a held value: delayed pulls wait in the soft-barrier order, not in the lazy one
}

// Gate holds back changes below a share of the tensor, as Gaia's significance filter does. The zero Gate holds back
// nothing.
type Gate struct {
	Threshold float64 `json:"threshold"` // of |change| / |value|, L2
	Decay     float64 `json:"decay"`     // the threshold of iteration i, counted from 1, is divided by i to the power of this
}

// Signature describes the options for messages, after a tensor's type and shape; "" where all are defaults.
func (d Declared) Signature() string {
	s := ""
	if d.Sync.Model != "" {
		s += " under " + d.Sync.Model
	}
	if d.Sync.SoftPark {
		s += " with soft-barrier parking"
	}
	if d.Codec != "" {
		s += " coded by " + d.Codec
	}
	if d.PullGate != (Gate{}) {
		s += fmt.Sprintf(" read where more than %g over iteration^%g of it has changed", d.PullGate.Threshold, d.PullGate.Decay)
	}
	if d.Authenticated {
		s += " authenticated"
	}
	return s
}

// Check reports the first option that is out of bounds.
func (d Declared) Check() error {
	switch {
	case len(d.Sync.Model) > limits.MaxSync:
		return fmt.Errorf("synchronisation model of %d bytes, limit %d", len(d.Sync.Model), limits.MaxSync)
	case len(d.Codec) > limits.MaxCodec:
		return fmt.Errorf("codec of %d bytes, limit %d", len(d.Codec), limits.MaxCodec)
	}
	return d.PullGate.Check()
}

// At is the threshold in an iteration, counted from 1.
func (g Gate) At(iteration uint64) float64 {
	return g.Threshold / math.Pow(float64(iteration), g.Decay)
}

// Check reports numbers that are invalid for a gate.
func (g Gate) Check() error {
	for _, x := range []float64{g.Threshold, g.Decay} {
		if !(x >= 0 && x <= math.MaxFloat64) {
			return fmt.Errorf("a gate of threshold %g and decay %g: both must be finite and at least 0", g.Threshold, g.Decay)
		}
	}
	return nil
}
