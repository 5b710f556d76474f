package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"testing"

	"github.com/paceline/paceline/internal/limits"
)

var token = Token{Region: 3, Key: 0x0123456789abcdef, Offset: 4096, Length: 1 << 20}

func TestATokenHasTheGoldenBytes(t *testing.T) {
	const golden = "0300000000000000efcdab8967452301" + "00100000000000000000100000000000"
	encoded := token.Append(nil)
	if got := hex.EncodeToString(encoded); got != golden || len(encoded) != TokenSize {
		t.Errorf("%d bytes %s, want %d bytes %s: if that is meant, raise Version", len(encoded), got, TokenSize, golden)
	}
}

func TestATokenThatIsCutOffIsRefused(t *testing.T) {
	encoded := token.Append(nil)
	for n := range encoded {
		if err := new(Token).Decode(encoded[:n]); !errors.Is(err, ErrToken) {
			t.Errorf("%d bytes: error %v, want ErrToken", n, err)
		}
	}
}

func FuzzToken(f *testing.F) {
	f.Add(token.Append(nil))
	f.Add((&Token{Offset: 1 << 63, Length: 1 << 63}).Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		var got Token
		if err := got.Decode(b); err != nil {
			return
		}
		if !bytes.Equal(got.Append(nil), b[:TokenSize]) {
			t.Errorf("%x decodes as %+v, which is other bytes", b[:TokenSize], got)
		}
		if got.Offset+got.Length > 2*limits.MaxTensor {
			t.Errorf("%+v is out of bounds", got)
		}
	})
}
