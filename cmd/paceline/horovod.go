package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/paceline/paceline/internal/version"
)

// python is the interpreter of a command: the command itself if it is one, else the first on the PATH.
func python(command []string) (string, error) {
	if len(command) > 0 && strings.HasPrefix(filepath.Base(command[0]), "python") {
		if path, err := exec.LookPath(command[0]); err == nil {
			return path, nil
		}
	}
	for _, name := range []string{"python", "python3"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("no python on the PATH")
}

// shimDir is the directory whose `horovod` package is Paceline: in the package that the interpreter
// finds, else in the environment that this binary was installed into.
func shimDir(command []string) (string, error) {
	const where = "import importlib.util as u; s = u.find_spec('paceline'); print(s.submodule_search_locations[0] if s else '')"
	interpreter, err := python(command)
	if err == nil {
		out, _ := exec.Command(interpreter, "-c", where).Output()
		if dir := filepath.Join(strings.TrimSpace(string(out)), "_horovod"); isShim(dir) {
			return dir, nil
		}
	}
	if self, err := os.Executable(); err == nil {
		if self, err = filepath.EvalSymlinks(self); err == nil {
			dirs, _ := filepath.Glob(filepath.Join(filepath.Dir(self), "..", "lib", "python3*", "site-packages", "paceline", "_horovod"))
			for _, dir := range dirs {
				if isShim(dir) {
					return dir, nil
				}
			}
		}
	}
	return "", fmt.Errorf("--horovod needs Paceline's Python package, and %s cannot import it: pip install paceline there", cmp.Or(interpreter, "python"))
}

func isShim(dir string) bool {
	info, err := os.Stat(filepath.Join(dir, "horovod", "__init__.py"))
	return filepath.IsAbs(dir) && err == nil && info.Mode().IsRegular()
}

// checkBuild answers horovodrun's --check-build.
func checkBuild(out io.Writer) {
	const has = `import importlib.util as u
for name in ("torch", "tensorflow", "mxnet", "jax", "paceline"): print(int(u.find_spec(name) is not None))`
	answers := []string{"0", "0", "0", "0", "0"}
	if interpreter, err := python(nil); err == nil {
		text, _ := exec.Command(interpreter, "-c", has).Output()
		if said := strings.Fields(string(text)); len(said) >= len(answers) {
			answers = said[len(said)-len(answers):] // behind what the interpreter's start may print
		}
	}
	mark := func(framework int) string {
		if answers[framework] == "1" && answers[4] == "1" {
			return "X"
		}
		return " "
	}
	fmt.Fprintf(out, `Paceline %s:

Available Frameworks:
    [%s] PyTorch
    [%s] TensorFlow
    [%s] MXNet
    [%s] JAX

Available Controllers:
    [X] Paceline
    [ ] MPI
    [ ] Gloo

Available Tensor Operations:
    [X] CPU over TCP
    [ ] NCCL
    [ ] DDL
    [ ] CCL
    [ ] MPI
    [ ] Gloo
`, version.String(), mark(0), mark(1), mark(2), mark(3))
}
