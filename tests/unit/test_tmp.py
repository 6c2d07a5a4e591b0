from .tiny_bert import *
def test_x(tiny_bert):
    model, plan, record = calibrated(tiny_bert, recipe_with())
    m = exported(model, plan)
    b = padded_batch()
    print(ptq.forward(model, b), run_onnx(m, b))
    fp = load_model(str(tiny_bert))
    print(ptq.forward(fp, b))
    print([ (n.name, n.op_type) for n in m.graph.node])
