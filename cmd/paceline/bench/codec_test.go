package bench

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/paceline/paceline/core/codec"
)

func TestEveryCodecIsMeasuredAndJudged(t *testing.T) {
	var r CodecReport
	if err := r.MeasureCodecs(CodecPlan{Codecs: DefaultCodecs(), Bytes: 64 << 10}); err != nil {
		t.Fatal(err)
	}
	for _, name := range codec.Names() {
		if !slices.ContainsFunc(r.Rows, func(row CodecRow) bool { return strings.HasPrefix(row.Codec, name) }) {
			t.Errorf("%s is not among the default codecs", name)
		}
	}
	for _, row := range r.Rows {
		if row.Repetitions < minCodecRepetitions || row.Encode.GBps <= 0 || row.DecodeAdd.OfMemcpy <= 0 || len(row.Losses) != 3 {
			t.Errorf("%+v", row)
		}
		if row.Codec == "fp16" && (row.Losses[0].Ratio != 2 || row.Losses[0].Error == 0 || row.Losses[0].Error > 0x1p-11) {
			t.Errorf("fp16: %+v", row.Losses)
		}
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
	var table strings.Builder
	if r.Show(&table); strings.Count(table.String(), "\n") != 4+len(r.Rows) {
		t.Error(table.String())
	}
}

func TestCodecPlansThatCannotBeMeasuredAreErrors(t *testing.T) {
	var r CodecReport
	for _, p := range []CodecPlan{{Codecs: []string{"gzip"}, Bytes: 64}, {Bytes: 0}, {Bytes: 6}} {
		if r.MeasureCodecs(p) == nil {
			t.Errorf("%+v", p)
		}
	}
}

// The gradient that stands for real ones is like those of embeddings: concentrated, some of it zero.
func TestTheSoftmaxGradientIsConcentrated(t *testing.T) {
	g := newGradients(1)[2].x
	zeros := 0
	squares := make([]float64, len(g))
	all := 0.0
	for i, v := range g {
		if v == 0 {
			zeros++
		}
		squares[i] = float64(v) * float64(v)
		all += squares[i]
	}
	slices.Sort(squares)
	top := 0.0
	for _, s := range squares[len(squares)*99/100:] {
		top += s
	}
	if zeros == 0 || zeros > len(g)*9/10 || !(top > all/2) || math.IsInf(all, 0) {
		t.Errorf("%d of %d are zero; the greatest hundredth has %v of %v", zeros, len(g), top, all)
	}
}
