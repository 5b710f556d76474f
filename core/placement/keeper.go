package placement

import "github.com/paceline/paceline/internal/units"

// Keeper is the member, of n, of a tensor's process set whose checkpoint has what the tensor's server keeps of a partition: they take
// turns, beginning with one that the name decides, a hash of the tensor's. Of a reducescatter it is the one that gets the rows: the others
// do not know when an iteration is closed. shape and size are those of the tensor and of its elements, offset is that of the partition, in bytes.
func Keeper(kind units.Kind, name uint64, shape []int64, size, n, part int, offset int64) int {
	if kind != units.Reducescatter || len(shape) == 0 {
		return int((name + uint64(part)) % uint64(n))
	}
	row := int64(size)
	for _, d := range shape[1:] {
		row *= d
	}
	for i := range n {
		if _, to := Rows(shape[0], n, i); offset < to*row {
			return i
		}
	}
	return n - 1 // an empty one
}
