package worker

import (
	"errors"
	"testing"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

func newTestBook() *book {
	b := newBook(&Config{PartitionBytes: 1 << 10, Membership: membership.NewView(&membership.Epoch{Servers: make([]membership.Server, 2)})})
	return &b
}

// sum is an allreduce of n bytes.
func sum(name string, n int) Op {
	return Op{Kind: units.Allreduce, DType: units.Uint8, ReduceOp: units.Sum, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Shape: []int64{int64(n)}, Name: name}
}

// start registers an operation whose tensor is declared at once.
func (b *book) start(op Op) *operation {
	o := b.register(&op)
	for _, d := range b.undeclared {
		d.state = declareDone
	}
	b.undeclared = nil
	return o
}

// end removes an operation from the book.
func (b *book) end(o *operation) {
	o.n.End(o.seq)
	delete(b.inflight, o)
}

func TestANameIsInFlightOnceForEachProcessSet(t *testing.T) {
	b := newTestBook()
	first := b.start(sum("x", 8))
	other := sum("x", 8)
	other.Set.ID = 1
	for _, c := range []struct {
		ops  []Op
		want error
	}{
		{[]Op{sum("x", 8)}, ErrDuplicate},
		{[]Op{sum("y", 8), sum("y", 8)}, ErrDuplicate},
		{[]Op{sum("y", 8), sum("z", 8), other}, nil},
		{[]Op{sum("", 8), sum("", 8)}, nil},
	} {
		if err := b.admit(c.ops); !errors.Is(err, c.want) {
			t.Errorf("%q and %d more: %v, want %v", c.ops[0].Name, len(c.ops)-1, err, c.want)
		}
	}
	b.end(first)
	if err := b.admit([]Op{sum("x", 8)}); err != nil {
		t.Error(err)
	}
}

// A tensor is declared with its first use, anew with another shape, and not again where the name comes back to a shape.
func TestATensorIsDeclaredOncePerSignature(t *testing.T) {
	b := newTestBook()
	var iterations []uint64
	for _, n := range []int{8, 8, 16, 8} {
		o := b.start(sum("x", n))
		iterations = append(iterations, o.iteration)
		b.end(o)
	}
	if n := len(b.names[nameID{0, "x"}].decls); n != 2 {
		t.Errorf("%d declarations, want one for each shape", n)
	}
	if iterations[1] != 1 || iterations[2] != 0 || iterations[3] != 2 {
		t.Errorf("iterations %v are not counted per declaration", iterations)
	}
}

// An operation that has failed on another rank fails here when it is started, without an iteration; the next one is
// declared anew.
func TestAFailureThatComesBeforeTheOperation(t *testing.T) {
	b := newTestBook()
	b.end(b.start(sum("x", 8)))
	why := errors.New("ranks disagree")
	if v := b.nameFailed(wire.Failure{Name: "x", Seq: 1}, why); len(v.Failed)+len(v.Later) > 0 {
		t.Fatalf("it ends %v and %v, which are not there", v.Failed, v.Later)
	}
	if o := b.start(sum("x", 8)); !errors.Is(o.err, why) || o.d != nil {
		t.Errorf("the operation has %v and a declaration %v", o.err, o.d)
	}
	o := b.start(sum("x", 8))
	if o.err != nil || o.iteration != 0 || o.d.t.Generation != 4 {
		t.Errorf("the one behind it has %v, iteration %d of generation %d, want 0 of 4", o.err, o.iteration, o.d.t.Generation)
	}
}
