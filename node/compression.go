package node

import (
	"io"
	"os"

	"github.com/paceline/paceline/core/policy"
)

// measured is the setting under which optimizers choose codecs by what they measure; all else is plain then.
const measured = "auto"

// Compression reads how tensors are to be coded: a setting, rules, or the path of a file with them.
func Compression(text string) (*policy.Policy, error) { return policy.Load(text, openFile) }

func jobCompression(text string) (*policy.Policy, error) {
	if text == measured {
		return nil, nil
	}
	return Compression(text)
}

// CheckCodec reports whether Compression takes a text. It is for the place where the user names a codec, before
// training starts.
func CheckCodec(text string) error {
	_, err := Compression(text)
	return err
}

func openFile(path string) (io.ReadCloser, error) { return os.Open(path) }
