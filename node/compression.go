package node

import (
	"io"
	"os"

	"github.com/paceline/paceline/core/policy"
)

// Compression reads how tensors are to be coded: a setting, rules, or the path of a file with them.
func Compression(text string) (*policy.Policy, error) { return policy.Load(text, openFile) }

// CheckCodec reports whether Compression takes a text. It is for the place where the user names a codec, before
// training starts.
func CheckCodec(text string) error {
	_, err := Compression(text)
	return err
}

func openFile(path string) (io.ReadCloser, error) { return os.Open(path) }
