package launch

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Shell describes how to get a shell on another host.
type Shell struct {
	Template string // command line; {host} stands for the host, which is appended if that is missing
	Port     int    // of ssh, 0 for its own setting
	Identity string // file of ssh's key, "" for its own setting
	Timeout  time.Duration
}

// keepAlive has ssh end when its host is silent for 30 s: processes of an elastic job that were lost with their host do not hold its end.
var keepAlive = []string{"-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"}

// For is the command line of the shell on a host. ssh gets the option that disables prompts, and ends with its host.
func (s Shell) For(host string) ([]string, error) {
	argv, err := splitWords(s.Template)
	if err != nil {
		return nil, fmt.Errorf("remote shell %q: %w", s.Template, err)
	}
	if filepath.Base(argv[0]) == "ssh" {
		argv = append(argv, "-o", "BatchMode=yes", "-o", fmt.Sprintf("ConnectTimeout=%d", max(1, int(s.Timeout.Seconds()))))
		argv = append(argv, keepAlive...)
		if s.Port > 0 {
			argv = append(argv, "-p", strconv.Itoa(s.Port))
		}
		if s.Identity != "" {
			argv = append(argv, "-i", s.Identity)
		}
	}
	if !strings.Contains(s.Template, "{host}") {
		return append(argv, host), nil
	}
	for i := range argv {
		argv[i] = strings.ReplaceAll(argv[i], "{host}", host)
	}
	return argv, nil
}

// splitWords splits a command line at its blanks; single and double quotes keep words together.
func splitWords(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	inWord, open := false, rune(0)
	for _, c := range line {
		switch {
		case open == 0 && (c == ' ' || c == '\t'):
			if inWord {
				words = append(words, word.String())
			}
			word.Reset()
			inWord = false
		case open == 0 && (c == '\'' || c == '"'):
			open, inWord = c, true
		case c == open:
			open = 0
		default:
			word.WriteRune(c)
			inWord = true
		}
	}
	if open != 0 {
		return nil, fmt.Errorf("a quote %c is not closed", open)
	}
	if inWord {
		words = append(words, word.String())
	}
	if len(words) == 0 {
		return nil, errors.New("it is empty")
	}
	return words, nil
}
