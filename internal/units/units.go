// Package units holds the small enumerations that every layer shares: element types, reduction
// operators and kinds of collective. Their numbers travel on the wire and over the C ABI, so they
// never change meaning; new ones are added at the end.
package units

import "fmt"

// Text is the name of a number, or where it has none its type and the number.
func Text[T ~uint8](names []string, kind string, number T) string {
	if int(number) < len(names) && names[number] != "" {
		return names[number]
	}
	return fmt.Sprintf("%s(%d)", kind, uint8(number))
}

// DType is the element type of a tensor.
type DType uint8

// Element types. The numbers are part of the wire format and of the C ABI.
const (
	Uint8 DType = iota
	Int8
	Int16
	Int32
	Int64
	Float16
	BFloat16
	Float32
	Float64
	Bool
	numDTypes
)

var dtypeNames = [numDTypes]string{"uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool"}
var dtypeSizes = [numDTypes]int{1, 1, 2, 4, 8, 2, 2, 4, 8, 1}

// Valid reports whether d is a known element type.
func (d DType) Valid() bool { return d < numDTypes }

// Size is the size of one element in bytes, 0 for an unknown type.
func (d DType) Size() int {
	if !d.Valid() {
		return 0
	}
	return dtypeSizes[d]
}

// Float reports whether d is a floating-point type.
func (d DType) Float() bool { return d >= Float16 && d <= Float64 }

func (d DType) String() string { return Text(dtypeNames[:], "dtype", d) }

// DTypes lists every element type.
func DTypes() []DType {
	all := make([]DType, numDTypes)
	for i := range all {
		all[i] = DType(i)
	}
	return all
}

// ReduceOp is the operator that combines contributions.
type ReduceOp uint8

// Reduction operators, with Horovod's numbers.
const (
	Average ReduceOp = iota
	Sum
	Adasum
	Min
	Max
	Product
	numOps
)

var opNames = [numOps]string{"Average", "Sum", "Adasum", "Min", "Max", "Product"}

// Valid reports whether op is a known operator.
func (op ReduceOp) Valid() bool { return op < numOps }

func (op ReduceOp) String() string { return Text(opNames[:], "op", op) }

// Kind is a kind of operation.
type Kind uint8

// Kinds of operation.
const (
	Allreduce Kind = iota
	Allgather
	Broadcast
	Alltoall
	Reducescatter
	Barrier
	Accumulate // not a collective: a value that the servers hold; each rank adds to it at its own pace
	Send       // a message to one rank
	Receive    // a message of one rank, or of any
	numKinds
)

var kindNames = [numKinds]string{"allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "accumulate", "send", "receive"}

// Valid reports whether k is a known kind.
func (k Kind) Valid() bool { return k < numKinds }

// Reduces reports whether the operation combines contributions (others only move data).
func (k Kind) Reduces() bool { return k == Allreduce || k == Reducescatter || k == Barrier }

func (k Kind) String() string { return Text(kindNames[:], "kind", k) }

// Message reports whether the operation is one end of a message: two ranks' own, which nobody declares.
func (k Kind) Message() bool { return k == Send || k == Receive }

// HasRoot reports whether one rank of the operation is its root.
func (k Kind) HasRoot() bool { return k == Broadcast }

// NeedsAll reports whether the operation has no result while a rank has joined: data or rows of that rank are missing
// (Horovod refuses the same kinds).
func (k Kind) NeedsAll() bool {
	return k == Allgather || k == Broadcast || k == Alltoall || k == Reducescatter
}

// Splits reports whether the ranks of the process set divide rows among them, so that none may be missing.
func (k Kind) Splits() bool { return k == Alltoall || k == Reducescatter }

// HasOp reports whether the operation combines contributions by an operator that the user names.
func (k Kind) HasOp() bool { return k == Allreduce || k == Reducescatter || k == Accumulate }

// Use is what an operation on a value that the servers hold does; the numbers are part of the C ABI.
type Use uint8

// Uses. Add and Read may come together: the read then waits as the synchronisation model says.
const (
	// Declare gives the value that the root has, to the servers and to every rank. All ranks do it once.
	Declare Use = 1 << iota
	// Add adds the rank's difference and ends its iteration.
	Add
	// Read gets the value as it is when the synchronisation model lets the rank go on.
	Read
	// ReadNow gets the value as it is, without waiting for anybody.
	ReadNow
	// Within comes with Add and ReadNow: an iteration within a superstep, which ends no iteration of the value.
	Within
	// Exact comes with a read: the value itself, however the tensor is coded.
	Exact
	allUses = Declare | Add | Read | ReadNow | Within | Exact
)

// Valid reports whether the combination of uses is allowed.
func (u Use) Valid() bool {
	return u == Declare || u != 0 && u&^(allUses&^Declare) == 0 && u&(Read|ReadNow) != Read|ReadNow &&
		(u&Within == 0 || u&^Exact == Add|ReadNow|Within) &&
		(u&Exact == 0 || u&(Read|ReadNow) != 0)
}

func (u Use) String() string {
	if u.Valid() && u&Exact != 0 {
		return (u &^ Exact).String() + " exactly"
	}
	return Text(useNames[:], "use", u)
}

var useNames = [allUses]string{
	Declare: "declare", Add: "add", Read: "read", ReadNow: "read now", Add | Read: "add and read", Add | ReadNow: "add and read now",
	Add | ReadNow | Within: "add and read now within a superstep",
}
