package jobtest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"unsafe"

	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/worker"
)

// Held is a float32 value that the servers hold, as one rank sees it.
type Held struct {
	Rank int
	Name string
	Sync string    // the synchronisation model
	Soft bool      // delayed pulls park in the soft-barrier order
	Now  []float32 // what was read last

	Group string // the first value of those with which it steps; "" without supersteps

	j *Job
}

// Held is a value of n elements on a rank, not declared yet.
func (j *Job) Held(rank int, name, sync string, n int) *Held {
	return &Held{Rank: rank, Name: name, Sync: sync, Now: make([]float32, n), j: j}
}

// Declare declares a value of n elements on a rank: all tens.
func (j *Job) Declare(rank int, name, sync string, n int) (*Held, error) {
	v := j.Held(rank, name, sync, n)
	err := v.Use(units.Declare, 10)
	if err == nil {
		err = v.Is(10)
	}
	return v, err
}

// Use does an operation on the value; every element of the input is x.
func (v *Held) Use(use units.Use, x float32) error {
	op := v.Op(use, x)
	if _, err := v.j.Do(v.Rank, op); err != nil {
		return err
	}
	v.Took(op)
	return nil
}

// Took stores what an operation has read.
func (v *Held) Took(op worker.Op) {
	copy(v.Now, unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(op.Output))), len(op.Output)/4))
}

// Op is the operation of a use.
func (v *Held) Op(use units.Use, x float32) worker.Op {
	op := worker.Op{
		Kind: units.Accumulate, DType: units.Float32, ReduceOp: units.Sum, Shape: []int64{int64(len(v.Now))}, Name: v.Name,
		Declared: options.Declared{Sync: options.Sync{Model: v.Sync, SoftPark: v.Soft}}, Held: worker.Held{Use: use},
	}
	op.Group = v.Group
	if use&units.Add != 0 || use == units.Declare && v.Rank == op.Root {
		op.Input = bytes.Repeat(binary.NativeEndian.AppendUint32(nil, math.Float32bits(x)), len(v.Now))
	}
	if use != units.Add {
		op.Output = make([]byte, 4*len(v.Now))
	}
	return op
}

// Is reports whether all elements of what was read last are x.
func (v *Held) Is(x float32) error {
	for i, y := range v.Now {
		if x != y {
			return fmt.Errorf("element %d of %q under %q on rank %d is %g, want %g", i, v.Name, v.Sync, v.Rank, y, x)
		}
	}
	return nil
}
