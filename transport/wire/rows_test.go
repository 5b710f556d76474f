package wire

import (
	"slices"
	"testing"
)

func TestRowsAreThoseThatWerePut(t *testing.T) {
	for _, rows := range []Rows{{}, {nil}, {{1, 2, 3}}, {nil, {1}, nil, {2, 3}}} {
		b := rows.Append(nil)
		n := int64(0)
		for _, of := range rows {
			n += int64(len(of))
		}
		got := make(Rows, len(rows))
		if err := got.Decode(b); err != nil || int64(len(b)) != RowsSize(len(rows), n) {
			t.Fatalf("%v: %d bytes, %v", rows, len(b), err)
		}
		for i := range rows {
			if !slices.Equal(got[i], rows[i]) {
				t.Errorf("%v are %v", rows, got)
			}
		}
		if err := got.Decode(append(b, 0)); err == nil {
			t.Errorf("%v with a byte more are taken", rows)
		}
		if len(b) > 0 {
			if err := got.Decode(b[:len(b)-1]); err == nil {
				t.Errorf("%v without the last byte are taken", rows)
			}
		}
	}
	if err := make(Rows, 2).Decode([]byte{255, 255, 255, 255, 255, 255, 255, 255, 1}); err == nil {
		t.Error("rows of more bytes than there are are taken")
	}
}

func FuzzRows(f *testing.F) {
	f.Add(uint8(2), Rows{{1}, {2, 3}}.Append(nil))
	f.Fuzz(func(t *testing.T, ranks uint8, b []byte) {
		rows := make(Rows, ranks)
		if err := rows.Decode(b); err == nil && !slices.Equal(rows.Append(nil), b) {
			t.Errorf("%x is read as %v", b, rows)
		}
	})
}
