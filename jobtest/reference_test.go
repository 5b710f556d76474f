package jobtest_test

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// collective is one operation of all ranks of a set: the inputs, and the results by a plain reference. Elements are small
// integers, so that sums are exact in every type and in every order.
type collective struct {
	kind     units.Kind
	dtype    units.DType
	op       units.ReduceOp
	set      wire.ProcessSet
	root     int
	priority int
	name     string
	rows     []int64   // of each member; equal except for allgather and alltoall
	width    int64     // elements in a row; 0 for tensors of one dimension
	splits   [][]int64 // alltoall: of each member
	pre      float64
	post     float64
	seed     int

	once   sync.Once
	inputs [][]byte
	wanted [][]byte
	whole  []byte // the reduction of all inputs
}

func (c *collective) String() string {
	return fmt.Sprintf("%v %v %v %q rows %v × %d, root %d, ranks %v, splits %v, scales %g %g", c.kind, c.op, c.dtype, c.name, c.rows, c.width, c.root, c.set.Ranks, c.splits, c.pre, c.post)
}

// prepare makes inputs and wanted results, once for all ranks.
func (c *collective) prepare() {
	c.once.Do(func() {
		for m := range c.set.Ranks {
			c.inputs = append(c.inputs, c.input(m))
		}
		if c.kind == units.Allreduce || c.kind == units.Reducescatter {
			c.whole = c.reduced()
		}
		for m := range c.set.Ranks {
			c.wanted = append(c.wanted, c.want(m))
		}
	})
}

func (c *collective) rowElements() int64 { return max(c.width, 1) }
func (c *collective) rowBytes() int64    { return c.rowElements() * int64(c.dtype.Size()) }

// value is element i of a member's input.
//
//go:norace
func (c *collective) value(member, i int) float64 {
	v := (i*7 + member*3 + c.seed) % 31
	switch {
	case c.dtype == units.Bool || c.op == units.Product:
		return float64(v%2 + 1 - b2i(c.dtype == units.Bool))
	case c.op == units.Adasum:
		return float64(v-15) / 8
	}
	return float64(v%4 + 1)
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

//go:norace
func (c *collective) input(member int) []byte {
	n := int(c.rows[member] * c.rowElements())
	b := make([]byte, 0, n*c.dtype.Size())
	for i := range n {
		b = jobtest.AppendElement(b, c.dtype, c.value(member, i))
	}
	return b
}

// operation is what a rank submits.
func (c *collective) operation(member int) worker.Op {
	c.prepare()
	op := worker.Op{
		Kind: c.kind, DType: c.dtype, ReduceOp: c.op, Set: c.set, Root: c.root, Priority: c.priority, Name: c.name,
		Shape: []int64{c.rows[member]}, Input: slices.Clone(c.inputs[member]), Prescale: c.pre, Postscale: c.post,
	}
	if c.width > 0 {
		op.Shape = append(op.Shape, c.width)
	}
	if c.splits != nil {
		op.Splits = c.splits[member]
	}
	switch c.kind {
	case units.Allreduce, units.Broadcast:
		op.Output = make([]byte, len(op.Input))
		if c.seed%2 == 0 {
			op.Output = op.Input // in place
		}
	case units.Reducescatter:
		op.Output = make([]byte, len(c.wanted[member]))
	case units.Barrier:
		op.Shape, op.Input = nil, nil
	}
	return op
}

// check compares a member's result with the reference.
func (c *collective) check(member int, op *worker.Op, out worker.Output) error {
	got := op.Output
	if c.kind == units.Allgather || c.kind == units.Alltoall {
		got = out.Data
		if want := c.received(member); !slices.Equal(out.Rows, want) {
			return fmt.Errorf("%v: member %d got rows %v, want %v", c, member, out.Rows, want)
		}
	}
	want := c.wanted[member]
	if bytes.Equal(got, want) {
		return nil
	}
	if len(got) != len(want) {
		return fmt.Errorf("%v: member %d got %d bytes, want %d", c, member, len(got), len(want))
	}
	size := c.dtype.Size()
	for i := 0; i < len(got); i += size {
		g, w := jobtest.Element(c.dtype, got[i:]), jobtest.Element(c.dtype, want[i:])
		if g != w && (c.op != units.Adasum || math.Abs(g-w) > c.tolerance()*max(1, math.Abs(w))) {
			return fmt.Errorf("%v: member %d element %d is %v, want %v", c, member, i/size, g, w)
		}
	}
	return nil
}

// tolerance is the relative error that Adasum may have, whose dot products are not exact.
func (c *collective) tolerance() float64 {
	switch c.dtype {
	case units.Float16:
		return 2e-3
	case units.BFloat16:
		return 1e-2
	case units.Float32:
		return 1e-5
	}
	return 1e-12
}

// received are the rows that a member gets from each.
func (c *collective) received(member int) []int64 {
	if c.kind == units.Allgather {
		return c.rows
	}
	rows := make([]int64, len(c.rows))
	for src := range rows {
		rows[src] = c.split(src)[member]
	}
	return rows
}

func (c *collective) split(src int) []int64 {
	if c.splits != nil {
		return c.splits[src]
	}
	even := make([]int64, len(c.rows))
	for i := range even {
		even[i] = c.rows[src] / int64(len(c.rows))
	}
	return even
}

func (c *collective) want(member int) []byte {
	switch c.kind {
	case units.Broadcast:
		return c.inputs[slices.Index(c.set.Ranks, c.root)]
	case units.Allgather:
		return bytes.Join(c.inputs, nil)
	case units.Alltoall:
		var all []byte
		for src := range c.rows {
			var before int64
			for _, rows := range c.split(src)[:member] {
				before += rows
			}
			from := before * c.rowBytes()
			all = append(all, c.inputs[src][from:from+c.split(src)[member]*c.rowBytes()]...)
		}
		return all
	case units.Allreduce:
		return c.whole
	case units.Reducescatter:
		n, rows := int64(len(c.rows)), c.rows[0]
		var from int64
		for m := range int64(member) {
			from += rows/n + int64(b2i(m < rows%n))
		}
		to := from + rows/n + int64(b2i(int64(member) < rows%n))
		return c.whole[from*c.rowBytes() : to*c.rowBytes()]
	}
	return nil
}

// reduced is the reduction of all inputs: scaled in the accumulator's type, combined in rank order,
// scaled again.
//
//go:norace
func (c *collective) reduced() []byte {
	n := len(c.inputs[0]) / c.dtype.Size()
	if c.op == units.Adasum {
		return c.adasum(n)
	}
	b := make([]byte, 0, len(c.inputs[0]))
	post, div := c.post, 1.0
	if c.op == units.Average {
		div = float64(len(c.rows))
	}
	for i := range n {
		acc := c.scaled(c.value(0, i), c.pre, 1)
		for m := 1; m < len(c.rows); m++ {
			acc = c.combine(acc, c.scaled(c.value(m, i), c.pre, 1))
		}
		if post != 1 || div != 1 {
			acc = c.scaled(acc, post, div)
		}
		b = jobtest.AppendElement(b, c.dtype, acc)
	}
	return b
}

//go:norace
func (c *collective) combine(a, b float64) float64 {
	var r float64
	switch c.op {
	case units.Min:
		r = min(a, b)
	case units.Max:
		r = max(a, b)
	case units.Product:
		r = a * b
	default:
		r = a + b
	}
	if !c.dtype.Float() { // whole numbers wrap around
		return jobtest.Element(c.dtype, jobtest.AppendElement(nil, c.dtype, r))
	}
	return r
}

// scaled is v·mul/div; integers are truncated towards zero.
//
//go:norace
func (c *collective) scaled(v, mul, div float64) float64 {
	switch {
	case !c.dtype.Float():
		return math.Trunc(v * mul / div)
	case c.dtype == units.Float64:
		return v * mul / div
	}
	return float64(float32(v) * float32(mul) / float32(div))
}

// adasum combines neighbours, then neighbouring pairs. Members beyond the greatest power of two are combined with the first
// ones before that.
func (c *collective) adasum(n int) []byte {
	vectors := make([][]float64, len(c.rows))
	for m := range vectors {
		for i := range n {
			vectors[m] = append(vectors[m], c.value(m, i))
		}
	}
	power := 1
	for power*2 <= len(vectors) {
		power *= 2
	}
	for m := power; m < len(vectors); m++ {
		vectors[m-power] = blend(vectors[m-power], vectors[m])
	}
	vectors = vectors[:power]
	for len(vectors) > 1 {
		var next [][]float64
		for m := 0; m < len(vectors); m += 2 {
			next = append(next, blend(vectors[m], vectors[m+1]))
		}
		vectors = next
	}
	b := make([]byte, 0, n*c.dtype.Size())
	for _, v := range vectors[0] {
		b = jobtest.AppendElement(b, c.dtype, v*c.pre*c.post)
	}
	return b
}

func blend(a, b []float64) []float64 {
	var aa, bb, ab float64
	for i := range a {
		aa, bb, ab = aa+a[i]*a[i], bb+b[i]*b[i], ab+a[i]*b[i]
	}
	ca, cb := 1.0, 1.0
	if aa != 0 {
		ca = 1 - ab/(2*aa)
	}
	if bb != 0 {
		cb = 1 - ab/(2*bb)
	}
	r := make([]float64, len(a))
	for i := range a {
		r[i] = ca*a[i] + cb*b[i]
	}
	return r
}
