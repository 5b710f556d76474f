package worker

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/name"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// Op is one operation, as the user asks for it. Input and output are dense memory in
// row-major order; it must stay valid and untouched until Done is called.
type Op struct {
	Kind                units.Kind
	DType               units.DType
	ReduceOp            units.ReduceOp
	Set                 wire.ProcessSet // ID and global ranks
	Root                int             // broadcast: global rank that has the data; send: that gets it; receive: that sends it, or AnyRank
	Tag                 uint64          // send, receive: only those with the same tag match
	Timeout             time.Duration   // after which the operation is given up; 0 for never
	Priority            int             // higher goes first
	Shape               []int64         // of the input; the caller's again when Submit returns
	Input               []byte
	Output              []byte  // allreduce, broadcast: as long as the input; reducescatter: this rank's rows; receive: of the shape; else nil
	Splits              []int64 // alltoall: rows for each rank of the set; nil for equal parts
	Prescale, Postscale float64
	Name                string // "" for unnamed: such operations match in the order of their submission
	Unnamed             bool   // the name is a label of the caller's, by which operations match: nothing is kept by it for the next one
	Sequence            string // of an unnamed one: those of the same sequence match in this order, whatever their kinds; "": the kind's

	options.Declared // allreduce, reducescatter, accumulate; of a held value the same in every use
	Held             // accumulate

	// Empty says that this rank's input is zeros, none of which are sent: Input is nil. The operation counts like
	// any other. For sums and averages, of held values with Add.
	Empty bool

	// AtOnce says that the caller waits for the operation next: it leaves at once, with all that is held.
	AtOnce bool

	// Unwaited says that nobody will call Flush for the operation.
	Unwaited bool

	// Done is called exactly once, from any goroutine, unless Submit returned an error. With an error the
	// output means nothing, but its memory, if the engine has allocated some, is the caller's to return.
	Done func(Output, error)
}

// Held is what an operation does with a value that the servers hold.
type Held struct {
	Use          units.Use
	Significance float32 // Add: |g|/|w| of the push; 0 where the model does not ask for it
	Group        string  // Declare, for models with supersteps: name of the first of the values that are stepped together
}

// Output is what an operation gives beyond its output memory.
type Output struct {
	Data  []byte  // allgather, alltoall: rows of all sources in rank order
	Rows  []int64 // allgather, alltoall: rows from each rank of the set
	Value int     // allgather: how many ranks are not lost; join: the last rank that joined; receive: the rank that sent
}

func (o *Op) name() string {
	switch {
	case o.Kind.Message(): // what it is called is for its texts: a rank may use any number of tags
	case o.Name != "":
		return o.Name
	case o.Sequence != "":
		return o.Sequence
	}
	return o.Kind.String() + ".noname"
}

// named reports whether the next operation of the name is the same tensor's, so that something may be kept for it.
func (o *Op) named() bool { return o.Name != "" && !o.Unnamed }

func (o *Op) member(rank int) int { return slices.Index(o.Set.Ranks, rank) }

// rowBytes is the size of one entry along the first dimension.
func (o *Op) rowBytes() int64 {
	n := int64(o.DType.Size())
	for _, d := range o.Shape[1:] {
		n *= d
	}
	return n
}

// check finds what is wrong with the operation on this rank alone.
func (o *Op) check(rank int) error {
	if !o.Kind.Valid() || !o.DType.Valid() || !o.ReduceOp.Valid() {
		return fmt.Errorf("%q: unknown kind %v, type %v or operator %v", o.name(), o.Kind, o.DType, o.ReduceOp)
	}
	for _, text := range []string{o.Name, o.Sequence, o.Group} {
		if text == "" {
			continue
		}
		if err := name.Check(text); err != nil {
			return fmt.Errorf("%v with %w", o.Kind, err)
		}
	}
	if len(o.Shape) > limits.MaxDims {
		return fmt.Errorf("%q: %d dimensions, limit %d", o.name(), len(o.Shape), limits.MaxDims)
	}
	if !finite(o.Prescale) || !finite(o.Postscale) {
		return fmt.Errorf("%q: prescale %g and postscale %g must be finite numbers", o.name(), o.Prescale, o.Postscale)
	}
	if o.Timeout < 0 {
		return fmt.Errorf("%s: a timeout of %v", o.what(), o.Timeout)
	}
	if err := o.checkEmpty(); err != nil {
		return err
	}
	bytes, err := o.bytes()
	if err != nil {
		return err
	}
	switch {
	case o.Kind == units.Accumulate:
		return o.checkUse(rank, bytes)
	case o.Kind.Message():
		return o.checkMessage(rank, bytes)
	}
	if o.PullGate != (options.Gate{}) {
		return fmt.Errorf("%q: a gate for pulls is for held values, not for %v", o.name(), o.Kind)
	}
	if want := o.inputBytes(bytes); int64(len(o.Input)) != want {
		return fmt.Errorf("%q: input of %d bytes for shape %v of %v, want %d", o.name(), len(o.Input), o.Shape, o.DType, want)
	}
	if o.member(rank) < 0 {
		return fmt.Errorf("%q: rank %d is not in process set %d %v", o.name(), rank, o.Set.ID, o.Set.Ranks)
	}
	return o.checkKind(rank, bytes)
}

// checkEmpty finds operations to which zeros are not nothing.
func (o *Op) checkEmpty() error {
	switch {
	case !o.Empty:
	case !o.Kind.HasOp() || o.Kind == units.Accumulate && o.Use&units.Add == 0:
		return fmt.Errorf("%q: a %v cannot be empty; that is for allreduce, reducescatter and adding to held values", o.name(), o.Kind)
	case o.ReduceOp != units.Sum && o.ReduceOp != units.Average:
		return fmt.Errorf("%q: an empty operation is for Sum and Average, not %v", o.name(), o.ReduceOp)
	}
	return nil
}

// inputBytes is how much of a tensor's bytes the input has.
func (o *Op) inputBytes(bytes int64) int64 {
	if o.Empty {
		return 0
	}
	return bytes
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// checkUse is check for a value that the servers hold.
func (o *Op) checkUse(rank int, bytes int64) error {
	in, out := o.useLengths(rank, bytes)
	switch {
	case !o.named():
		return fmt.Errorf("a %v needs a name", o.Kind)
	case !o.Use.Valid():
		return fmt.Errorf("%q: unknown %v", o.Name, o.Use)
	case !o.DType.Float() || o.ReduceOp != units.Sum && o.ReduceOp != units.Average:
		return fmt.Errorf("%q: differences of floating-point tensors are accumulated by Sum or Average, not those of %v by %v", o.Name, o.DType, o.ReduceOp)
	case o.member(rank) < 0:
		return fmt.Errorf("%q: rank %d is not in process set %d %v", o.Name, rank, o.Set.ID, o.Set.Ranks)
	case o.Use == units.Declare && o.member(o.Root) < 0:
		return fmt.Errorf("%q: root rank %d is not in process set %d %v", o.Name, o.Root, o.Set.ID, o.Set.Ranks)
	case o.PullGate.Check() != nil:
		return fmt.Errorf("%q: %w", o.Name, o.PullGate.Check())
	case math.IsNaN(float64(o.Significance)) || o.Significance < 0:
		return fmt.Errorf("%q: significance %g, allowed are 0 and more", o.Name, o.Significance)
	case int64(len(o.Input)) != in:
		return fmt.Errorf("%q: input of %d bytes to %v shape %v of %v, want %d", o.Name, len(o.Input), o.Use, o.Shape, o.DType, in)
	case int64(len(o.Output)) != out:
		return fmt.Errorf("%q: output of %d bytes to %v shape %v of %v, want %d", o.Name, len(o.Output), o.Use, o.Shape, o.DType, out)
	}
	return nil
}

// gives reports whether a use sends this rank's input to the value.
func (o *Op) gives(rank int) bool {
	return o.Use&units.Add != 0 || o.Use == units.Declare && o.Root == rank
}

// useLengths are the bytes of input and output of a use, of a value of so many.
func (o *Op) useLengths(rank int, bytes int64) (in, out int64) {
	if o.gives(rank) {
		in = o.inputBytes(bytes)
	}
	if o.Use&(units.Read|units.ReadNow|units.Declare) != 0 {
		out = bytes
	}
	return in, out
}

// Lengths are the bytes of input and output memory that the operation needs on a rank.
func (o *Op) Lengths(rank int) (in, out int64, err error) {
	bytes, err := o.bytes()
	if err != nil {
		return 0, 0, err
	}
	in = o.inputBytes(bytes)
	switch o.Kind {
	case units.Accumulate:
		in, out = o.useLengths(rank, bytes)
	case units.Receive:
		in, out = 0, bytes
	case units.Allreduce, units.Broadcast:
		out = bytes
	case units.Reducescatter:
		if i := o.member(rank); i >= 0 && len(o.Shape) > 0 {
			from, to := placement.Rows(o.Shape[0], len(o.Set.Ranks), i)
			out = (to - from) * o.rowBytes()
		}
	}
	return in, out, nil
}

func (o *Op) bytes() (int64, error) {
	if o.Kind == units.Barrier {
		return 0, nil
	}
	n := int64(o.DType.Size())
	for _, d := range o.Shape {
		if d < 0 {
			return 0, fmt.Errorf("%q: negative dimension in shape %v", o.name(), o.Shape)
		}
		if d > 0 && n > limits.MaxTensor/d {
			return 0, fmt.Errorf("%q: shape %v of %v is larger than the limit of %d bytes", o.name(), o.Shape, o.DType, int64(limits.MaxTensor))
		}
		n *= d
	}
	return n, nil
}

func (o *Op) checkKind(rank int, bytes int64) error {
	switch o.Kind {
	case units.Allreduce, units.Reducescatter:
		if o.DType == units.Bool {
			return fmt.Errorf("%q: %v of bool tensors is not defined; convert to uint8 first", o.name(), o.Kind)
		}
		if o.ReduceOp == units.Adasum {
			if !o.DType.Float() || o.Kind == units.Reducescatter {
				return fmt.Errorf("%q: Adasum is defined for allreduce of floating-point tensors, not for %v of %v", o.name(), o.Kind, o.DType)
			}
			if bytes > limits.MaxPayload {
				return fmt.Errorf("%q: Adasum needs the whole tensor in one piece: %d bytes, limit %d", o.name(), bytes, limits.MaxPayload)
			}
		}
		if o.Kind == units.Reducescatter {
			return o.checkScatter(rank)
		}
		return o.checkOutput(bytes)
	case units.Broadcast:
		if o.member(o.Root) < 0 {
			return fmt.Errorf("%q: root rank %d is not in process set %d %v", o.name(), o.Root, o.Set.ID, o.Set.Ranks)
		}
		return o.checkOutput(bytes)
	case units.Allgather, units.Alltoall:
		if len(o.Shape) == 0 {
			return fmt.Errorf("%q: %v needs a tensor of at least one dimension", o.name(), o.Kind)
		}
		if o.Kind == units.Alltoall {
			return o.checkSplits()
		}
	}
	return nil
}

func (o *Op) checkOutput(bytes int64) error {
	if int64(len(o.Output)) != bytes {
		return fmt.Errorf("%q: output of %d bytes, want %d", o.name(), len(o.Output), bytes)
	}
	return nil
}

func (o *Op) checkScatter(rank int) error {
	if len(o.Shape) == 0 {
		return fmt.Errorf("%q: reducescatter needs a tensor of at least one dimension", o.name())
	}
	from, to := placement.Rows(o.Shape[0], len(o.Set.Ranks), o.member(rank))
	return o.checkOutput((to - from) * o.rowBytes())
}

func (o *Op) checkSplits() error {
	n := int64(len(o.Set.Ranks))
	if o.Splits == nil {
		if o.Shape[0]%n != 0 {
			return fmt.Errorf("%q: alltoall without splits needs a first dimension divisible by %d ranks, not %d", o.name(), n, o.Shape[0])
		}
		return nil
	}
	if int64(len(o.Splits)) != n {
		return fmt.Errorf("%q: %d splits for %d ranks", o.name(), len(o.Splits), n)
	}
	var sum int64
	for _, s := range o.Splits {
		if s < 0 || s > o.Shape[0] {
			return fmt.Errorf("%q: splits %v, allowed are 0 to the first dimension, %d", o.name(), o.Splits, o.Shape[0])
		}
		sum += s
	}
	if sum > o.Shape[0] {
		return fmt.Errorf("%q: splits %v sum to %d, more than the first dimension, %d", o.name(), o.Splits, sum, o.Shape[0])
	}
	return nil
}
