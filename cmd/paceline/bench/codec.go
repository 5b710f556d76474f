package bench

import (
	"fmt"
	"io"
	"math"
	"text/tabwriter"
	"time"
	"unsafe"

	"github.com/paceline/paceline/core/codec"
)

// CodecPlan describes a measurement of codecs.
type CodecPlan struct {
	Codecs   []string      // settings
	Bytes    int64         // of the float32 tensor that is timed
	Duration time.Duration // for each codec
}

// DefaultCodecs are one of each, two of them with a lossless stage.
func DefaultCodecs() []string {
	return []string{
		"none", "fp16", "bf16", "int8", "int4", "qsgd", "qsgd:coding=elias", "terngrad", "natural", "onebit",
		"topk:0.01", "topk:0.001", "randomk:0.01", "threshold:2.5", "dgc:0.001", "int4+s2", "terngrad+zstd",
	}
}

// Speed is of one direction, one core, in bytes of the tensor; the share is relative to a copy of
// the tensor that alternates with it.
type Speed struct {
	GBps     float64 `json:"gb_per_s"` // 1e9 to the GB
	OfMemcpy float64 `json:"of_memcpy"`
}

// Loss is the effect of one message on a gradient: the factor by which it is smaller, and the L2 norm of what it
// lacks, relative to the gradient's. The residual, which would send that later, is empty before.
type Loss struct {
	Gradient string  `json:"gradient"`
	Ratio    float64 `json:"ratio"`
	Error    float64 `json:"relative_l2_error"`
}

// CodecRow is the result of one codec. The times are those for the normal gradient.
type CodecRow struct {
	Codec       string `json:"codec"`
	Residual    bool   `json:"residual"`
	Unbiased    bool   `json:"unbiased"`
	Encode      Speed  `json:"encode"`
	Decode      Speed  `json:"decode"`
	DecodeAdd   Speed  `json:"decode_add"`
	Losses      []Loss `json:"losses"`
	Repetitions int    `json:"repetitions"`
}

// CodecReport is the file that --json writes.
type CodecReport struct {
	Head
	Bytes      int64      `json:"bytes"`
	MemcpyGBps float64    `json:"memcpy_gb_per_s"`
	Rows       []CodecRow `json:"rows"`
}

// MeasureCodecs carries out the plan on one core and fills the report's rows. Every message is decoded and checked.
func (r *CodecReport) MeasureCodecs(plan CodecPlan) error {
	if plan.Bytes < 4 || plan.Bytes%4 != 0 || plan.Bytes > 4*codec.MaxElements {
		return fmt.Errorf("%d bytes are not 1 to %d elements of float32", plan.Bytes, codec.MaxElements)
	}
	codecs := make([]codec.Codec, len(plan.Codecs))
	for i, setting := range plan.Codecs {
		var err error
		if codecs[i], err = codec.Parse(setting); err != nil {
			return err
		}
	}
	all := newGradients(int(plan.Bytes / 4))
	for _, c := range codecs {
		row, memcpy, err := measureCodec(c, all, plan.Duration)
		if err != nil {
			return err
		}
		r.Rows = append(r.Rows, row)
		r.MemcpyGBps = max(r.MemcpyGBps, memcpy)
	}
	r.Bytes = plan.Bytes
	return nil
}

// minCodecRepetitions is the least number of repetitions of all three steps.
const minCodecRepetitions = 3

// measureCodec alternates a copy and the three steps, and uses the least time of each: other load on the machine
// only adds.
func measureCodec(c codec.Codec, all []gradients, duration time.Duration) (row CodecRow, memcpy float64, err error) {
	x := rawFloats(all[0].x)
	n := len(x) / 4
	row = CodecRow{Codec: c.String(), Residual: c.ResidualBytes(n) > 0, Unbiased: c.Unbiased()}
	for _, g := range all {
		loss, err := lossOf(c, g)
		if err != nil {
			return row, 0, err
		}
		row.Losses = append(row.Losses, loss)
	}
	dst, buf, residual := make([]byte, len(x)), make([]byte, c.MaxEncoded(n)), make([]byte, c.ResidualBytes(n))
	least := [4]float64{math.Inf(1), math.Inf(1), math.Inf(1), math.Inf(1)} // seconds
	for began := time.Now(); row.Repetitions < minCodecRepetitions || time.Since(began) < duration; row.Repetitions++ {
		var message []byte
		for i, step := range []func(){
			func() { copy(dst, x) },
			func() { message = buf[:c.Encode(buf, x, residual, codec.Stream{Iteration: uint64(row.Repetitions)})] },
			func() { err = c.Decode(dst, message) },
			func() { err = c.DecodeAdd(dst, message) },
		} {
			started := time.Now()
			step()
			least[i] = min(least[i], time.Since(started).Seconds())
			if err != nil {
				return row, 0, err
			}
		}
	}
	speed := func(i int) Speed { return Speed{float64(len(x)) / least[i] / 1e9, least[0] / least[i]} }
	row.Encode, row.Decode, row.DecodeAdd = speed(1), speed(2), speed(3)
	return row, speed(0).GBps, nil
}

// lossOf sends one message.
func lossOf(c codec.Codec, g gradients) (Loss, error) {
	n := len(g.x)
	buf, decoded := make([]byte, c.MaxEncoded(n)), make([]float32, n)
	m := c.Encode(buf, rawFloats(g.x), make([]byte, c.ResidualBytes(n)), codec.Stream{})
	if err := c.Decode(rawFloats(decoded), buf[:m]); err != nil {
		return Loss{}, err
	}
	var lacks, all float64
	for i, v := range g.x {
		d := float64(v) - float64(decoded[i])
		lacks += d * d
		all += float64(v) * float64(v)
	}
	return Loss{g.name, float64(4*n) / float64(max(m, 1)), math.Sqrt(lacks / all)}, nil
}

func rawFloats(x []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x))
}

// Show prints the report as a table.
func (r *CodecReport) Show(out io.Writer) {
	fmt.Fprintf(out, "float32, %d bytes, one core; memcpy %.1f GB/s; after each speed its share of memcpy\n", r.Bytes, r.MemcpyGBps)
	fmt.Fprint(out, "normal: normal numbers; heavy: Student's t with 3 degrees of freedom; real: of a softmax regression on words;\nfor each how many times smaller, and the relative L2 error of one message\n")
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "codec\tresidual\tencode GB/s\t\tdecode\t\tand add\t")
	for _, g := range []string{"normal", "heavy", "real"} {
		fmt.Fprintf(table, "\t%s\terror", g)
	}
	fmt.Fprint(table, "\t\n")
	for _, row := range r.Rows {
		fmt.Fprintf(table, "%s\t%s", row.Codec, map[bool]string{true: "yes", false: "no"}[row.Residual])
		for _, s := range []Speed{row.Encode, row.Decode, row.DecodeAdd} {
			fmt.Fprintf(table, "\t%.2f\t%.2f", s.GBps, s.OfMemcpy)
		}
		for _, l := range row.Losses {
			fmt.Fprintf(table, "\t%.1f\t%.4f", l.Ratio, l.Error)
		}
		fmt.Fprint(table, "\t\n")
	}
	_ = table.Flush() // as with Fprintf: there is no one to report to
}
