// Package placement cuts tensors into partitions and assigns these to servers. It is pure: the result depends
// only on the arguments and on earlier placements.
//
// It has two goals. Every server holds equal bytes, or a share by its weight:
// FluentPS's EPS. And a single tensor uses all servers, but no partition is so small that its header costs more
// than its bytes: the lesson of the modularized parameter server's uniform split.
package placement

import "github.com/paceline/paceline/internal/limits"

// line is the alignment of partitions in bytes: no two servers' results share a cache line.
const line = 64

// tiny is the number of lines below which alignment is not worth unequal partitions.
const tiny = 4

// Cut computes the bytes of each partition of a tensor. The tensor has total bytes in elements of
// elem bytes, and the settings want partitions of up to partBytes. Partitions are
//
//   - whole elements, and multiples of 64 bytes where they are not tiny, but for the last;
//   - as equal as that allows, and as many for each server as for any other, so that a tensor alone
//     spreads evenly: 1 MiB over 2 servers is twice 512 KiB;
//   - at least limits.MinPartition (or partBytes, where that is less) where the tensor is cut only to
//     spread it: 64 KiB stays whole, and 200 KiB over 8 servers is three partitions.
//
// slices, nil for none, are rising byte offsets at which the tensor must be cut, even against the
// rules above: reducescatter's rows of each rank. A tensor without bytes has one partition without
// bytes. There are never more than limits.MaxParts: partitions grow beyond partBytes before that.
func Cut(total uint64, elem, partBytes, servers int, slices []int64) []uint32 {
	return cut(total, elem, partBytes, servers, limits.MinPartition, slices)
}

// cut is Cut, with at least least bytes in a partition that only spreads a tensor.
func cut(total uint64, elem, partBytes, servers, least int, slices []int64) []uint32 {
	if total == 0 {
		return []uint32{0}
	}
	c := cutter{elem: uint64(elem), wide: lcm(uint64(elem), line)}
	c.most = max(uint64(partBytes), c.elem, ceil(total, limits.MaxParts/2))
	if c.most >= tiny*c.wide {
		c.most -= c.most % c.wide
	}
	c.least = min(uint64(max(least, elem)), c.most)
	wanted := roundUp(ceil(total, c.most), uint64(max(servers, 1)))

	var begin uint64
	for _, end := range append(append([]int64(nil), slices...), int64(total)) {
		if size := uint64(end) - begin; size > 0 {
			c.cut(size, wanted*size/total)
			begin = uint64(end)
		}
	}
	return c.parts
}

// Rows are the rows of a reducescatter's result that member i of n gets: even shares, the first ones one row longer
// where it does not divide (Horovod's rule).
func Rows(rows int64, n, i int) (from, to int64) {
	share, extra := rows/int64(n), rows%int64(n)
	start := func(i int64) int64 { return i*share + min(i, extra) }
	return start(int64(i)), start(int64(i) + 1)
}

// cutter cuts one tensor, slice by slice.
type cutter struct {
	elem, wide  uint64 // where a cut may fall: elements, preferably lines
	least, most uint64 // bytes of a partition
	parts       []uint32
}

// cut cuts size bytes into wanted partitions: fewer where they would become too small, more where
// they would be too large.
func (c *cutter) cut(size, wanted uint64) {
	n := max(1, min(wanted, size/c.least))
	unit := c.elem
	if size/max(n, ceil(size, c.most)) >= tiny*c.wide {
		unit = c.wide
	}
	units := ceil(size, unit)
	n = max(n, ceil(units, c.most/unit))
	for i := range n {
		begin, end := i*units/n*unit, min((i+1)*units/n*unit, size)
		c.parts = append(c.parts, uint32(end-begin))
	}
}

func ceil(a, b uint64) uint64 { return (a + b - 1) / b }

func roundUp(a, multiple uint64) uint64 { return ceil(a, multiple) * multiple }

func lcm(a, b uint64) uint64 {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	return a / x * b
}
